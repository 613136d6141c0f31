# Waiting for a key: who is woken by what, what a wait costs, and what is left
# of one that is cut short; with the library preloaded and without.
#
# Whether a waiter was woken, or has only looked again, nothing but time can
# tell: preloaded, it looks by itself once a second.  So each kind of wake-up
# is done twenty times over, and in most of them must take less than a quarter of
# that second.  It takes milliseconds.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;
use Time::HiRes qw(time);

my $rounds = 20;
my $crowd = 200;

my $node = new_node('waiting',
	conf => "max_connections = 250\nrestart_after_crash = on\nclient_connection_check_interval = 100ms\n");
my ($admin, $owner, $waiter);

sub connect_all
{
	($admin, $owner, $waiter) = map { session($node) } 1 .. 3;
	return;
}

# Until all SESSIONS' calls wait, be it asleep or in the lock manager.
sub wait_until_all_wait
{
	my (@sessions) = @_;
	my $pids = join(', ', map { $_->pid } @sessions);
	return wait_until(
		sub {
			$admin->value(qq{SELECT count(*) FROM pg_stat_activity
							 WHERE wait_event_type IN ('Extension', 'Lock') AND pid IN ($pids)}) eq @sessions;
		},
		@sessions . ' sessions to wait');
}

sub wait_until_gone
{
	my ($session) = @_;
	my $pid = $session->pid;
	return wait_until(
		sub { $admin->value("SELECT count(*) FROM pg_stat_activity WHERE pid = $pid") eq '0' },
		"backend $pid to be gone");
}

# No lock is held or waited for but by the owner's open transaction.
sub is_clean
{
	my ($name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $pid = $owner->pid;
	is($admin->value(
			qq{SELECT count(*) FROM pg_locks
			   WHERE NOT granted OR locktype = 'advisory' AND database <> 0 OR pid <> $pid AND
				 relation IN ('idempotency_keys'::regclass, 'idempotency_keys_pkey'::regclass)}),
		'0', "$name: no lock is left");
	return;
}

# The calls that wait.  Each answers with what became of its wait: an outcome,
# "claimed" where it is the first to run the command or to see the message.
my %calls = (
	'idem_claim' => q{SELECT outcome, attempt FROM idem_claim('KEY', wait => '10 min')},
	'idem_execute' => q{SELECT CASE WHEN outcome <> 'completed' OR replayed THEN outcome ELSE 'claimed' END, attempt
						FROM idem_execute('KEY', 'SELECT 1', wait => '10 min')},
	'idem_execute without limit' =>
	  q{SELECT CASE WHEN outcome <> 'completed' OR replayed THEN outcome ELSE 'claimed' END, attempt
		FROM idem_execute('KEY', 'SELECT 1')},
	'idem_once' => q{SELECT CASE WHEN idem_once('KEY') THEN 'claimed' ELSE 'completed' END},
	'idem_once_many' => q{SELECT CASE WHEN count(*) = 2 THEN 'claimed' ELSE 'completed' END
						  FROM idem_once_many('{z.KEY,KEY}')});

# Those that wait for a claim that is committed, too.
my @sleepers = ('idem_claim', 'idem_execute', 'idem_execute without limit');

sub call
{
	my ($name, $key) = @_;
	return $calls{$name} =~ s/KEY/$key/gr;
}

#
# What wakes.  "before" is what the owner has done when the waiter comes, and
# "act" what he does then; what comes "by itself" may be over before anybody has
# seen the waiter wait.  Who waits in the lock manager can't tell a released
# savepoint from the transaction around it, as with a row lock, so where that
# matters the waiter has to be one that is "asleep".
#
my $claim = q{SELECT token FROM idem_claim('KEY', lease => '1 h')};
my $batch = q{FROM idem_claim_many('{a.KEY,KEY,z.KEY}', lease => '1 h')};
my %wakers = (
	'a commit' =>
	  { before => "BEGIN; $claim", act => q{SELECT idem_complete('KEY'); COMMIT}, answer => 'completed|1' },
	'a rollback' => { before => "BEGIN; $claim", act => 'ROLLBACK', answer => 'claimed|1' },
	'a rollback to a savepoint' =>
	  { before => "BEGIN; SAVEPOINT a; $claim", act => 'ROLLBACK TO a', answer => 'claimed|1', after => 'COMMIT' },
	'a rollback to an outer savepoint' => {
		before => "BEGIN; SAVEPOINT a; SAVEPOINT b; $claim; RELEASE b",
		act => 'ROLLBACK TO a', answer => 'claimed|1', after => 'COMMIT', asleep => 1 },
	'a completion' =>
	  { before => $claim, act => q{SELECT idem_complete('KEY', '1', TOKEN)}, answer => 'completed|1' },
	'a failure' => { before => $claim, act => q{SELECT idem_fail('KEY', '1', TOKEN)}, answer => 'failed|1' },
	'a failure to be retried' => {
		before => $claim,
		act => q{SELECT idem_fail('KEY', '1', TOKEN, disposition => 'retry')}, answer => 'claimed|2' },
	'a failure of unknown outcome' => {
		before => $claim,
		act => q{SELECT idem_fail('KEY', '1', TOKEN, disposition => 'unknown')}, answer => 'unknown|1' },
	'a resolution' =>
	  { before => $claim, act => q{SELECT idem_resolve('KEY', 'completed')}, answer => 'completed|1' },
	'a deletion' => { before => $claim, act => q{SELECT idem_forget('KEY')}, answer => 'claimed|1' },
	'a lease that is cut short' =>
	  { before => $claim, act => q{SELECT idem_renew('KEY', TOKEN, '1 ms')}, answer => 'claimed|2' },
	'a checkpoint that cuts the lease short' => {
		before => $claim,
		act => q{SELECT idem_checkpoint('KEY', TOKEN, 'c', lease => '1 ms')}, answer => 'claimed|2' },
	'the end of a lease' => {
		before => q{SELECT token FROM idem_claim('KEY', lease => '100 ms')}, by_itself => 1, answer => 'claimed|2' },
	'a batch of completions' => {
		before => "SELECT $batch",
		act => q{SELECT idem_complete_many(array_agg(key), array_agg(token))
				 FROM idempotency_keys WHERE key LIKE '%KEY'}, answer => 'completed|1' },
	'a batch of claims and completions' => {
		before => "BEGIN; SELECT $batch",
		act => q{SELECT idem_complete_many('{z.KEY,KEY,a.KEY}', NULL); COMMIT}, answer => 'completed|1' },
	'a message' => { before => q{BEGIN; SELECT idem_once('KEY')}, act => 'COMMIT', answer => 'completed|1' },
	'messages that are not taken' => {
		before => q{BEGIN; SELECT FROM idem_once_many('{a.KEY,KEY,z.KEY}')},
		act => 'ROLLBACK', answer => 'claimed|1' },
	'a command' =>
	  { before => q{BEGIN; SELECT idem_execute('KEY', 'SELECT 1')}, act => 'COMMIT', answer => 'completed|1' },
	'a command that fails' =>
	  { before => q{BEGIN; SELECT idem_execute('KEY', 'SELECT 1 / 0')}, act => 'COMMIT', answer => 'failed|1' },
	'PREPARE TRANSACTION and COMMIT PREPARED' => {
		before => "BEGIN; $claim; SELECT idem_complete('KEY')",
		act => q{PREPARE TRANSACTION 'KEY'}, by_admin => q{COMMIT PREPARED 'KEY'}, answer => 'completed|1' },
	'COMMIT PREPARED' => {
		before => "BEGIN; $claim; SELECT idem_complete('KEY'); PREPARE TRANSACTION 'KEY'",
		by_admin => q{COMMIT PREPARED 'KEY'}, answer => 'completed|1' },
	'ROLLBACK PREPARED' => {
		before => "BEGIN; $claim; PREPARE TRANSACTION 'KEY'",
		by_admin => q{ROLLBACK PREPARED 'KEY'}, answer => 'claimed|1' },
	'the death of the owner' =>
	  { before => "BEGIN; $claim", by_admin => 'SELECT pg_terminate_backend(OWNER)', kills => 1, answer => 'claimed|1' });

# One round: the answer of the waiter, and the time from the act to it.
sub wake_up
{
	my ($waker, $call, $key) = @_;
	my $token = $owner->value($waker->{before} =~ s/KEY/$key/gr);
	$waiter->send(call($call, $key));
	wait_until_all_wait($waiter) unless $waker->{by_itself};

	my $start = time();
	my $pid = $owner->pid;
	$owner->value($waker->{act} =~ s/KEY/$key/gr =~ s/TOKEN/$token/gr) if $waker->{act};
	$admin->value($waker->{by_admin} =~ s/KEY/$key/gr =~ s/OWNER/$pid/r) if $waker->{by_admin};
	my $answer = $waiter->fetch;
	my $seconds = time() - $start;

	$owner->value($waker->{after}) if $waker->{after};
	$owner = session($node) if $waker->{kills};
	return ($answer, $seconds);
}

sub check_wakers
{
	my ($where, $repeat, $limit) = @_;
	my $number = 0;
	foreach my $name (sort keys %wakers)
	{
		my (@seconds, %answers);
		$number++;
		foreach my $round (1 .. $repeat)
		{
			my $call = $sleepers[ $round % ($wakers{$name}{asleep} ? 2 : 3) ];
			my ($answer, $took) = wake_up($wakers{$name}, $call, "wake.$number.$round");
			$answers{$answer}++;
			push @seconds, $took;
		}
		is(join(' ', sort keys %answers), $wakers{$name}{answer}, "$where: after $name, the waiter has the answer");
		my ($median) = (sort { $a <=> $b } @seconds)[ @seconds / 2 ];
		cmp_ok($median, '<', $limit, "$where: $name wakes") if $limit;
	}
	return;
}

#
# Two sessions that take turns: each waits for the key that the other completes
# next, and completes the one that the other waits for.  They come and go at any
# moment of each other's, and a wake-up that gets lost costs a second.
#
sub check_turns
{
	my ($where, $turns) = @_;
	$admin->value(
		qq{CREATE TABLE turn AS SELECT ordinal AS n, key, token
		   FROM idem_claim_many(ARRAY(SELECT '$where.' || n FROM generate_series(1, $turns) n), lease => '1 h')});
	$admin->value(
		q{CREATE PROCEDURE take_turns(mine int) LANGUAGE plpgsql AS $$
		DECLARE
			t record;
		BEGIN
			FOR t IN SELECT * FROM turn ORDER BY n LOOP
				IF t.n % 2 = mine THEN
					PERFORM idem_complete(t.key, to_jsonb(t.n), t.token);
				ELSIF (SELECT response <> to_jsonb(t.n) FROM idem_claim(t.key, wait => '10 min')) THEN
					RAISE 'not what was waited for';
				END IF;
				COMMIT;
			END LOOP;
		END $$});
	my $start = time();
	$owner->send('CALL take_turns(0)');
	$waiter->send('CALL take_turns(1)');
	$_->fetch foreach $owner, $waiter;
	my $seconds = time() - $start;
	$admin->value('DROP PROCEDURE take_turns; DROP TABLE turn');
	return $seconds;
}

#
# Many that wait for one key.
#

# The time that the processes have had on a CPU, in seconds; undef where the
# system doesn't tell.
sub cpu_time
{
	my (@pids) = @_;
	my $nanoseconds = 0;
	foreach my $pid (@pids)
	{
		open(my $file, '<', "/proc/$pid/schedstat") or return;
		$nanoseconds += (split / /, <$file>)[0];
		close($file);
	}
	return $nanoseconds / 1e9;
}

# How often anybody has looked at a key so far, going by who has reported it.
sub looks
{
	return $admin->value(q{SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'idempotency_keys_pkey'});
}

sub check_crowd
{
	my ($where, $cpu_limit) = @_;
	my $looks = looks();
	my $start = time();
	my @crowd = map { session($node) } 1 .. $crowd;
	my @levels = ('read committed', 'repeatable read', 'serializable');
	my @pids = map { $_->pid } @crowd;
	my $pids = join(', ', @pids);

	$crowd[$_]->value("SET default_transaction_isolation = '$levels[$_ % 3]'") foreach 0 .. $#crowd;
	$owner->value(qq{BEGIN; SELECT idem_claim('crowd of $where')});
	$_->send(qq{SELECT outcome, response FROM idem_claim('crowd of $where', wait => '10 min')}) foreach @crowd;
	wait_until_all_wait(@crowd);

	ok( wait_until(
			sub { $admin->value("SELECT count(*) FROM pg_locks WHERE locktype <> 'virtualxid' AND pid IN ($pids)") eq '0' },
			'a moment at which nobody looks'),
		"$where: $crowd waiters hold no lock");
	is($admin->value("SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid IN ($pids)"),
		'0', "$where: nor a transaction id");

	# A second is what the owner takes for his work.
	my $before = cpu_time(@pids);
	$owner->value('SELECT pg_sleep(1)');
	my $after = cpu_time(@pids);
  SKIP:
	{
		skip 'no /proc/PID/schedstat', 1 unless defined $before && defined $after;
		cmp_ok($after - $before, '<', $cpu_limit, "$where: and leave the machine idle while he works");
	}
	is(scalar grep({ $_->is_done } @crowd), 0, "$where: nobody has gone away meanwhile");

	$owner->value(qq{SELECT idem_complete('crowd of $where', '"done"'); COMMIT});
	my %answers;
	$answers{ $_->fetch }++ foreach @crowd;
	is(join(' ', %answers), qq{completed|"done" $crowd}, "$where: each has the result");
	is_clean("$where, after the crowd");
	$_->close foreach @crowd;
	wait_until_gone($_) foreach @crowd;		# they have reported then how often they looked
	my $seconds = int(time() - $start) + 1;
	cmp_ok(looks() - $looks, '<', $crowd * (5 + 2 * $seconds), "$where: nobody looks at the key all the time")
	  if $where eq 'preloaded';
	return;
}

#
# Waits that are cut short leave nothing behind, and those who wait for the same
# key before and after it are woken all the same.
#
my %cuts = (
	'cancelled' => sub {
		my ($name, $victim) = @_;
		$admin->value('SELECT pg_cancel_backend(' . $victim->pid . ')');
		is($victim->result->{error}{C}, '57014', "$name: an error says so");
	},
	'timed out' => sub {
		my ($name, $victim) = @_;
		is($victim->result->{error}{C}, '57014', "$name: an error says so");
	},
	'terminated' => sub {
		my ($name, $victim) = @_;
		$admin->value('SELECT pg_terminate_backend(' . $victim->pid . ')');
		is($victim->result->{error}{C}, '57P01', "$name: an error says so");
		wait_until_gone($victim);
	},
	'abandoned' => sub {
		my ($name, $victim) = @_;
		$victim->close;
		ok(wait_until_gone($victim), "$name: the server notices that its client has gone");
	});

sub check_cut
{
	my ($where, $call, $held, $cut) = @_;
	my $name = "$where, $call, $held, $cut";
	my $key = "cut $where $call $held $cut" =~ s/ /_/gr;
	my ($victim, $after) = map { session($node) } 1 .. 2;
	my @waiters = ($waiter, $after);

	$owner->value(($held eq 'open' ? 'BEGIN; ' : '') . "SELECT FROM idem_claim_many('{$key,z.$key}', lease => '1 h')");
	$waiter->send(call($call, $key));
	$victim->value('BEGIN; CREATE TEMPORARY TABLE kept (n int); SAVEPOINT a');
	$victim->value('SET LOCAL statement_timeout = 200') if $cut eq 'timed out';
	$victim->send(call($call, $key));
	wait_until_all_wait($waiter, $cut eq 'timed out' ? () : $victim);
	$cuts{$cut}->($name, $victim);
	$after->send(call($call, $key));

	if ($cut eq 'cancelled' || $cut eq 'timed out')
	{
		# Its transaction goes on, and waits for the same key again.
		$victim->value('ROLLBACK TO a; INSERT INTO kept VALUES (1)');
		$victim->send(call($call, $key));
		push @waiters, $victim;
	}
	wait_until_all_wait(@waiters);
	$owner->value(qq{SELECT idem_complete_many(array_agg(key), array_agg(token))
					 FROM idempotency_keys WHERE key LIKE '%$key'});
	$owner->value('COMMIT') if $held eq 'open';
	is(scalar grep({ $_->fetch =~ /^completed/ } @waiters), scalar @waiters, "$name: all others are served");
	$_->close foreach $after, $victim;
	wait_until_gone($_) foreach $after, $victim;
	is_clean($name);
	return;
}

#
# A prepared transaction that outlives the server.
#
sub check_prepared
{
	my ($where) = @_;
	my @names = sort keys %calls;
	my %session;
	my $start_to_wait = sub {
		%session = map { $_ => session($node) } @names;
		$session{$_}->send(call($_, "prepared.$where.$_" =~ s/ /_/gr)) foreach @names;
		wait_until_all_wait(values %session);
	};
	foreach my $end ('COMMIT', 'ROLLBACK')
	{
		my $expected = $end eq 'COMMIT' ? qr/^completed/ : qr/^claimed/;
		$owner->value('BEGIN');
		foreach my $key (map { "prepared.$where.$_" =~ s/ /_/gr } @names)
		{
			$owner->value(qq{SELECT idem_claim('$key'), idem_claim('z.$key'), idem_complete('$key'), idem_complete('z.$key')});
		}
		$start_to_wait->();
		$owner->value(q{PREPARE TRANSACTION 'restart'});
		$owner->close;
		$node->restart;
		ok($_->result->{error}, "$where: a waiter is thrown out when the server stops") foreach values %session;
		connect_all();
		$start_to_wait->();
		$admin->value("$end PREPARED 'restart'");
		like($session{$_}->fetch, $expected, "$where: $end PREPARED after a restart ends the wait of $_") foreach @names;
		$admin->value('DELETE FROM idempotency_keys');
	}
	return;
}

sub check_all
{
	my ($where, $name_of_event) = @_;
	my ($preloaded) = $where eq 'preloaded';

	# What pg_stat_activity says.
	$owner->value(q{SELECT idem_claim('shown', lease => '1 h')});
	$waiter->send(q{SELECT outcome FROM idem_claim('shown', wait => '10 min')});
	wait_for_sleep($admin, $waiter);
	is($admin->value('SELECT wait_event_type, wait_event FROM pg_stat_activity WHERE pid = ' . $waiter->pid),
		"Extension|$name_of_event", "$where: the wait event");
	$owner->value(q{SELECT idem_forget('shown')});
	$waiter->fetch;

	check_wakers($where, $preloaded ? ($rounds, 0.25) : (3));
	cmp_ok(check_turns($where, 1000), '<', 300, "$where: a thousand turns, without a second for each") if $preloaded;
	check_crowd($where, $preloaded ? 0.5 : 1);
	foreach my $cut (sort keys %cuts)
	{
		check_cut($where, $_, 'open', $cut) foreach sort keys %calls;
		check_cut($where, $_, 'committed', $cut) foreach @sleepers;
	}
	check_prepared($where);
	return;
}

connect_all();
my $event = $admin->value('SHOW server_version_num') >= 170000 ? 'IdempotencyKey' : 'Extension';
check_all('preloaded', $event);

#
# kill -9 of a waiter: the server starts anew, and so does its shared memory.
#
$owner->value(q{SELECT idem_claim('killed', lease => '1 h')});
$waiter->send(q{SELECT outcome FROM idem_claim('killed', wait => '10 min')});
wait_for_sleep($admin, $waiter);
kill 'KILL', $waiter->pid;
$_->result foreach $waiter, $owner, $admin;
$admin = session_again($node);
connect_all();
$waiter->send(q{SELECT outcome, response FROM idem_claim('killed', wait => '10 min')});
wait_for_sleep($admin, $waiter);
$owner->value(q{SELECT idem_complete('killed', '"done"', token) FROM idempotency_keys WHERE key = 'killed'});
is($waiter->fetch, 'completed|"done"', 'after kill -9 of a waiter, another one is woken');

$node->append_conf('postgresql.conf', "shared_preload_libraries = ''\n");
$node->restart;
connect_all();
check_all('not preloaded', $event);

is($admin->value('SELECT sum(deadlocks) FROM pg_stat_database'), '0', 'there was no deadlock');
no_faults($node);
$node->stop;
done_testing();
