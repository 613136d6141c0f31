# Many sessions at once: one owner a key, no error of any kind.
#
# The sessions meet at a barrier inside the server: each one's statement first
# asks for a shared advisory lock that the test holds, and calls the function
# when it has it.  When all stand there, the lock is let go, and they start
# together, with snapshots that are older than what the others do.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;
use Time::HiRes qw(time);

my $node = new_node('races', conf => "max_connections = 120\nlog_statement = none\n");
my $gate = session($node);
my @sessions = map { session($node) } 1 .. 64;
my @levels = ('read committed', 'repeatable read', 'serializable');
$sessions[$_]->value("SET default_transaction_isolation = '$levels[$_ % 3]'") foreach 0 .. $#sessions;

# What any session has been answered with an error since the last look.
my %errors;

# In a statement BARRIER, in the FROM list, is where it waits; its one column,
# "go", is an empty string that what is called has to depend on.
sub with_barrier
{
	my ($sql) = @_;
	return $sql =~ s/BARRIER/(SELECT left(pg_advisory_xact_lock_shared(1)::text, 0) AS go OFFSET 0) barrier/r;
}

# start_together SQL...: the n-th session runs the n-th statement.
sub start_together
{
	my (@sql) = @_;
	my $count = @sql;
	$gate->value('SELECT pg_advisory_lock(1)');
	$sessions[$_]->send(with_barrier($sql[$_])) foreach 0 .. $#sql;
	wait_until(
		sub {
			$gate->value(q{SELECT count(*) FROM pg_locks
						   WHERE locktype = 'advisory' AND objsubid = 1 AND NOT granted}) eq $count;
		},
		"$count sessions at the barrier");
	$gate->value('SELECT pg_advisory_unlock(1)');
	return;
}

# The session's answer: its rows as text, or a SQLSTATE.
sub answer_of
{
	my ($session) = @_;
	my $result = $session->result;
	return $session->text($result) unless $result->{error};
	$errors{"$result->{error}{C} $result->{error}{M}"}++;
	return $result->{error}{C};
}

sub together
{
	my (@sql) = @_;
	start_together(@sql);
	return map { answer_of($_) } @sessions[ 0 .. $#sql ];
}

sub count_of
{
	my ($pattern, @answers) = @_;
	return scalar grep { /$pattern/ } @answers;
}

# no_errors NAME, EXPECTED: none but of that SQLSTATE.
sub no_errors
{
	my ($name, $expected) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(join('; ', grep { !$expected || !/^$expected / } sort keys %errors), '', $name);
	%errors = ();
	return;
}

# The first session that has its answer, of which there must be one.
sub first_answered
{
	my (@among) = @_;
	my $first;
	wait_until(sub { ($first) = grep { $_->is_done } @among; $first }, 'one of the sessions to be answered');
	return $first;
}

#
# 64 sessions, 500 keys.
#
$_->value(with_barrier(q{PREPARE race AS SELECT outcome, token, attempt
						FROM BARRIER, idem_claim($1 || go, '{"n": 1}', lease => '1 h')}))
  foreach @sessions;
my (@not_one, @not_alike, @tokens);
my $started = time();
foreach my $key (1 .. 500)
{
	my @answers = together(("EXECUTE race('k$key')") x 64);
	my ($owner) = grep { /^claimed\|\d+\|1$/ } @answers;
	push @not_one, "k$key" if count_of('^claimed', @answers) != 1;
	push @not_alike, "k$key" if count_of('^processing\|\|1$', @answers) != 63;
	push @tokens, $owner && $owner =~ /\|(\d+)\|/ ? $1 : 'none';
}
note(sprintf '%.1f s for 500 keys', time() - $started);
is("@not_one", '', 'each of 500 keys has exactly one owner among 64 sessions');
is("@not_alike", '', 'all others are told processing, with the owner\'s attempt');
no_errors('and nobody gets an error');
is($gate->value(q{SELECT count(*), count(DISTINCT token) FROM idempotency_keys WHERE status = 'processing'}),
	'500|500', 'there is one row a key');
is($gate->value(q{SELECT string_agg(token::text, ' ' ORDER BY substr(key, 2)::int) FROM idempotency_keys}),
	"@tokens", 'with the token that its owner was given');

#
# A key that can be claimed again: expired, its lease ended, or to be retried.
# While a take-over has not committed, it may be the last attempt that is shown.
#
my %again = (
	expired => [ '1 h', q{idem_complete(key, '"old"', token, ttl => '1 ms')}, 1 ],
	ended => [ '1 ms', q{token}, 2 ],
	retried => [ '1 h', q{idem_fail(key, '"old"', token, disposition => 'retry')}, 2 ]);
foreach my $kind (sort keys %again)
{
	my ($lease, $settle, $attempt) = @{ $again{$kind} };
	my @wrong;
	foreach my $n (1 .. 50)
	{
		my $key = "$kind.$n";
		my $old = $gate->value("SELECT token FROM idem_claim('$key', '{\"n\": 1}', lease => '$lease')");
		$gate->value("SELECT $settle FROM (VALUES ('$key', $old)) v(key, token); SELECT pg_sleep(0.002)");
		my @answers = together(
			("SELECT outcome, attempt, token > $old, response
			  FROM BARRIER, idem_claim('$key' || go, '{\"n\": 1}', lease => '1 h')") x 32);
		push @wrong, $key
		  if count_of("^claimed\\|$attempt\\|t\\|\$", @answers) != 1
		  || count_of("^processing\\|(?:1|$attempt)\\|\\|\$", @answers) != 31;
	}
	is("@wrong", '', "$kind: exactly one of 32 sessions takes the key over, 50 times");
	no_errors("$kind: nobody gets an error");
}

#
# All wait; the owner completes.
#
start_together(
	("SELECT outcome, token, response FROM BARRIER, idem_claim('waited' || go, '{}', wait => '10 min')") x 64);
my $owner = first_answered(@sessions);
my ($outcome, $token) = split /\|/, answer_of($owner);
is($outcome, 'claimed', 'one of 64 that are ready to wait owns the key');
$gate->value("SELECT idem_complete('waited', '\"once\"', $token)");
is(count_of('^completed\|\|"once"$', map { answer_of($_) } grep { $_ != $owner } @sessions), 63,
	'the others wait for its result');
no_errors('and nobody gets an error');

# The owner's transaction ends without a result: the next one owns the key.
my %end = (
	rollback => sub { $_[0]->value('ROLLBACK') },
	death => sub { $gate->value('SELECT pg_terminate_backend(' . $_[0]->pid . ')') });
foreach my $end (sort keys %end)
{
	my $first = session($node);
	$first->value("BEGIN; SELECT idem_claim('inherited.$end', '{}')");
	start_together(
		("SELECT outcome, token, response FROM BARRIER, idem_claim('inherited.$end' || go, '{}', wait => '10 min')") x 16);
	my @waiters = @sessions[ 0 .. 15 ];
	wait_for_sleep($gate, $_) foreach @waiters;
	$end{$end}->($first);
	my $heir = first_answered(@waiters);
	my ($outcome, $token) = split /\|/, answer_of($heir);
	is($outcome, 'claimed', "$end of the owner: one of 16 waiters owns the key");
	is((grep { $_ != $heir && $_->is_done } @waiters), 0, "$end of the owner: the others wait for that one now");
	$gate->value("SELECT idem_complete('inherited.$end', '2', $token)");
	is(count_of('^completed\|\|2$', map { answer_of($_) } grep { $_ != $heir } @waiters), 15,
		"$end of the owner: and get its result");
	no_errors("$end of the owner: without an error");
}

#
# The whole of the work in one transaction: done once.
#
$gate->value(<<'SQL');
CREATE TABLE orders (key text NOT NULL);
CREATE FUNCTION place_order(order_key text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	claim record;
BEGIN
	SELECT * INTO claim FROM idem_claim(order_key, '{"amount": 5}', wait => '10 min');
	IF claim.outcome = 'claimed' THEN
		INSERT INTO orders VALUES (order_key);
		PERFORM pg_sleep(0.005);
		PERFORM idem_complete(order_key, to_jsonb('order of ' || pg_backend_pid()));
		RETURN 'placed';
	END IF;
	RETURN claim.outcome;
END $$
SQL
my @orders_wrong;
foreach my $n (1 .. 20)
{
	my @answers = together(("SELECT place_order('order.$n' || go) FROM BARRIER") x 64);
	push @orders_wrong, $n if count_of('^placed$', @answers) != 1 || count_of('^completed$', @answers) != 63;
}
is("@orders_wrong", '', '64 sessions place the same order, 20 times: one does, the others get its result');
is($gate->value('SELECT count(*), count(DISTINCT key) FROM orders'), '20|20', 'there are 20 orders');
no_errors('and nobody gets an error, whatever the isolation level');

#
# The owner completes while another takes over: one of them loses.
#
# check_pairs NAME, PREFIX, ANSWER...: the answers of owner and rival, in turn.
my %seen;

sub check_pairs
{
	my ($name, $prefix, @answers) = @_;
	my ($completed, $taken) = (0, 0);
	while (my ($own, $rival) = splice @answers, 0, 2)
	{
		$seen{"$own $rival"}++;
		$completed++ if $own eq 't';
		$taken++ if $rival eq 'claimed|2';
		push @{ $seen{wrong} }, "$name: $own, $rival"
		  unless "$own $rival" =~ /^(?:t (?:completed\|1|processing\|1)|IK410 claimed\|2)$/;
	}
	my $stored = $gate->value("SELECT count(*) FILTER (WHERE status = 'completed' AND attempt = 1),
									  count(*) FILTER (WHERE status = 'processing' AND attempt = 2)
							   FROM idempotency_keys WHERE key LIKE '$prefix%'");
	push @{ $seen{wrong} }, "$name: stored $stored, answered $completed|$taken"
	  unless $stored eq "$completed|$taken";
	return;
}

# Claims twenty keys; returns [ token, end of the lease ] of each.
sub claim_twenty
{
	my ($prefix, $lease) = @_;
	return @{
		$gate->query("SELECT token, lease_until FROM (
						SELECT n, (idem_claim('$prefix' || n, lease => '$lease')).token FROM generate_series(1, 20) n OFFSET 0) c,
						LATERAL (SELECT lease_until FROM idem_get('$prefix' || n)) g
					  ORDER BY n")->{rows} };
}

# After the lease has ended: both at one instant.
foreach my $round (1 .. 25)
{
	my $prefix = "late.$round.";
	my @claims = claim_twenty($prefix, '1 ms');
	$gate->value('SELECT pg_sleep(0.002)');
	my @pairs = map {
		(   "SELECT idem_complete('$prefix$_' || go, '1', $claims[$_ - 1][0]) FROM BARRIER",
			"SELECT outcome, attempt FROM BARRIER, idem_claim('$prefix$_' || go, lease => '1 h')")
	} 1 .. 20;
	check_pairs('after the lease', $prefix, together(@pairs));
}
is(join('; ', @{ $seen{wrong} || [] }), '', 'completion against take-over, 500 times after the lease: never both');
note(join ', ', map { "$_: $seen{$_}" } sort grep { $_ ne 'wrong' } keys %seen);
no_errors('the one error is that the claim was lost', 'IK410');

# At its end: the rival waits for it, the owner completes about then.
%seen = ();
foreach my $round (1 .. 25)
{
	my $prefix = "end.$round.";
	my @claims = claim_twenty($prefix, '60 ms');
	my @pairs = map {
		my ($token, $lease_until) = @{ $claims[ $_ - 1 ] };
		my $early = ($_ - 10) / 2000;
		(   "SELECT idem_complete('$prefix$_' || slept, '1', $token)
			 FROM BARRIER, LATERAL (
				SELECT left(pg_sleep(extract(epoch FROM '$lease_until' - clock_timestamp()) - $early)::text, 0) || go AS slept
				OFFSET 0) c",
			"SELECT outcome, attempt FROM BARRIER, idem_claim('$prefix$_' || go, lease => '1 h', wait => '10 min')")
	} 1 .. 20;
	check_pairs('at its end', $prefix, together(@pairs));
}
is(join('; ', @{ $seen{wrong} || [] }), '', 'completion against take-over, 500 times at the end of the lease: never both');
note(join ', ', map { "$_: $seen{$_}" } sort grep { $_ ne 'wrong' } keys %seen);
no_errors('the one error is that the claim was lost', 'IK410');

#
# A row that several sessions write, and that moves from page to page, back and
# forth: whoever looks for it finds it, at whatever moment it moves.
#
$gate->value(q{SELECT count(*) FROM (SELECT idem_claim('neighbour.' || n, operation => repeat('x', 200))
									 FROM generate_series(1, 400) n OFFSET 0) x});
$token = $gate->value(q{SELECT token FROM idem_claim('moving', lease => '1 h')});
$gate->value('VACUUM idempotency_keys');
$node->pgbench(
	'--no-vacuum --client=6 --jobs=2 --transactions=2500', 0,
	[qr{processed: 15000/15000}], [qr{^(?!.*ERROR)}s],
	'a row that moves is found each time',
	{   '005_write@400' => qq{SELECT idem_checkpoint('moving', $token, string_agg(md5(random()::text), ''))
							FROM generate_series(1, 40)},
		'005_get@100' => q{SELECT 1 / count(*) FROM idem_get('moving')},
		'005_claim@100' => q{SELECT 1 / (outcome = 'processing')::int FROM idem_claim('moving')},
		'005_vacuum@1' => q{VACUUM idempotency_keys} });

#
# A dead version that a vacuum could not reach, of a row whose later versions it
# has removed together with the end of the table: the look doesn't go there.
#
$node->safe_psql('postgres', 'CREATE DATABASE stump');
my ($w, $pin, $vacuum) = map { session($node, dbname => 'stump') } 1 .. 3;
$w->value('CREATE EXTENSION idempotency');
$token = $w->value(q{SELECT token FROM idem_claim('K', lease => '1 h')});
$w->value(q{SELECT count(*) FROM idem_once_many(ARRAY(SELECT 'fill' || n FROM generate_series(1, 20000) n))});
$w->value(qq{BEGIN;
	SELECT idem_checkpoint('K', $token, 'x', (SELECT to_jsonb(string_agg(md5(n::text), '')) FROM generate_series(1, 50) n));
	SELECT idem_forget('K')});
$w->value(q{DELETE FROM idempotency_keys WHERE ctid >= '(100,0)'; COMMIT});
$pin->value(q{BEGIN; DECLARE c CURSOR FOR SELECT key FROM idempotency_keys WHERE ctid = '(0,2)'});
is($pin->value('FETCH c'), 'fill1', 'the first page is pinned');
$vacuum->send('VACUUM idempotency_keys');
wait_until(sub { $w->value('SELECT phase FROM pg_stat_progress_vacuum') eq 'truncating heap' }, 'the vacuum to come to the end');
$pin->value('COMMIT');
is($vacuum->result->{error}, undef, 'and to cut it off');
is($w->value(q{SELECT pg_relation_size('idempotency_keys') / 8192}), '100', 'the table is shorter');
is($w->value(q{SELECT count(*) FROM idem_get('K')}), '0', 'a look at what was there finds nothing');
is($w->value(q{SELECT outcome, attempt FROM idem_claim('K')}), 'claimed|1', 'and a claim is the first one');
$_->close foreach $w, $pin, $vacuum;

#
# Duplicates that come in while the owner works: none gets the key before the
# lease ends, one does then.
#
my $lease_until = $gate->value(q{SELECT idem_claim('in flight', '{}', lease => '1 s');
								 SELECT lease_until FROM idem_get('in flight')});
my ($early, $late) = (0, 0);
while (!$late)
{
	$_->send("SELECT outcome, attempt, clock_timestamp() >= '$lease_until' FROM idem_claim('in flight', '{}', lease => '1 h')")
	  foreach @sessions[ 0 .. 9 ];
	my @answers = map { answer_of($_) } @sessions[ 0 .. 9 ];
	$early += count_of('^claimed\|\d+\|f$', @answers);
	$late += count_of('^claimed\|2\|t$', @answers);
}
is($early, 0, 'no duplicate is given the key while the lease runs');
is($late, 1, 'and one when it has ended');
no_errors('without an error');

#
# Two transactions that each hold what the other waits for: no deadlock, since
# nobody waits holding a lock; each is told processing when its time is over.
#
my ($left, $right) = @sessions[ 0, 3 ];
$left->value(q{BEGIN; SELECT idem_claim('left')});
$right->value(q{BEGIN; SELECT idem_claim('right')});
$left->send(q{SELECT outcome FROM idem_claim('right', wait => '1500 ms')});
$right->send(q{SELECT outcome FROM idem_claim('left', wait => '1500 ms')});
is($_->fetch, 'processing', 'a crosswise wait ends') foreach $left, $right;
$_->value('COMMIT') foreach $left, $right;

is($gate->value(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database <> 0}), '0', 'no lock is left');
is($gate->value(q{SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()}), '0', 'there was no deadlock');
no_faults($node);
$node->stop;
done_testing();
