# What survives a crash, and which commits are flushed for it.
#
# synchronous_commit is off, and the processes that would write WAL in the
# background are stopped: what is on disk after a crash is what commits have
# flushed.  idempotency.durable = off shows that the tests could fail.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;
use Time::HiRes qw(sleep);

my $node = new_node('crash',
	conf => "synchronous_commit = off\n"
	  . "wal_writer_delay = 10s\n"
	  . "checkpoint_timeout = 1h\n"
	  . "restart_after_crash = on\n"
	  . "shared_buffers = 32MB\n");		# a page that is evicted flushes, too

my ($s, $other);						# sessions of the server's present life

sub up
{
	$node->start unless defined $node->{_pid};
	$s = session($node);
	$other = session($node);
	flushed();							# reads catalogs, which may write hints to them
	return;
}

sub down
{
	crash($node);
	return;
}

# Has the WAL been flushed up to the session's last record?  Past the end of a
# page the insert position stands behind the next page's header already.
sub flushed
{
	return $s->value(<<'SQL') eq 't';
WITH p AS (SELECT pg_current_wal_insert_lsn() - '0/0' AS insert_at,
				  pg_current_wal_flush_lsn() - '0/0' AS flushed_to)
SELECT flushed_to >= insert_at
	- CASE insert_at % 8192 WHEN 24 THEN 24 WHEN 40 THEN 40 ELSE 0 END FROM p
SQL
}

sub status_of
{
	my ($key) = @_;
	return $s->value('SELECT status FROM idem_get(' . sql_quote($key) . ')') || 'absent';
}

up();
$s->value('CREATE TABLE orders (key text NOT NULL)');

#
# Which commits are flushed.  "setup" is what other transactions have committed
# before, TOKEN the token of the claim among it, KEY a key of the case's own.
#
my $ended_claim =
  "SELECT token FROM idem_claim('KEY', lease => '1 ms'); SELECT pg_sleep(0.002)";

my @commits = (
	# name, flushed, setup, transaction
	[ 'a claim', 1, [], "SELECT idem_claim('KEY')" ],
	[ 'a take-over', 1, ["SELECT token FROM idem_claim('KEY', lease => '1 ms')"],
		"SELECT idem_claim('KEY', wait => '1s')" ],
	[ 'a completion of an earlier claim', 1, ["SELECT token FROM idem_claim('KEY')"],
		"SELECT idem_complete('KEY', '1', TOKEN)" ],
	[ 'a final failure', 1, ["SELECT token FROM idem_claim('KEY')"],
		"SELECT idem_fail('KEY', '1', TOKEN)" ],
	[ 'a failure to be retried', 1, ["SELECT token FROM idem_claim('KEY')"],
		"SELECT idem_fail('KEY', '1', TOKEN, disposition => 'retry')" ],
	[ 'a failure of unknown outcome', 1, ["SELECT token FROM idem_claim('KEY')"],
		"SELECT idem_fail('KEY', '1', TOKEN, disposition => 'unknown')" ],
	[ 'a renewal', 1, ["SELECT token FROM idem_claim('KEY')"],
		"SELECT idem_renew('KEY', TOKEN, '1 h')" ],
	[ 'a checkpoint', 1, ["SELECT token FROM idem_claim('KEY')"],
		"SELECT idem_checkpoint('KEY', TOKEN, 'halfway')" ],
	[ 'a resolution', 1, ["SELECT token FROM idem_claim('KEY')"],
		"SELECT idem_resolve('KEY', 'completed', '1')" ],
	[ 'a deletion', 1, ["SELECT token FROM idem_claim('KEY')"], "SELECT idem_forget('KEY')" ],

	[ 'work without a key', 0, [], "INSERT INTO orders VALUES ('KEY')" ],
	[ 'a claim settled in its own transaction', 0, [],
		"SELECT idem_claim('KEY'); INSERT INTO orders VALUES ('KEY'); SELECT idem_complete('KEY')" ],
	[ 'a claim failed in its own transaction', 0, [],
		"SELECT idem_claim('KEY'); INSERT INTO orders VALUES ('KEY'); SELECT idem_fail('KEY')" ],
	[ 'a take-over settled in its own transaction', 0,
		["SELECT token FROM idem_claim('KEY', lease => '1 ms')"],
		"SELECT idem_claim('KEY', wait => '1s'); SELECT idem_complete('KEY')" ],
	[ 'a claim retried and settled in one transaction', 0, [],
		"SELECT idem_claim('KEY'); SELECT idem_fail('KEY', disposition => 'retry');
		 SELECT idem_claim('KEY'); SELECT idem_complete('KEY')" ],
	[ 'two claims of which one is settled', 1, [],
		"SELECT idem_claim('KEY'); SELECT idem_claim('KEY.2'); SELECT idem_complete('KEY')" ],
	[ 'two claims of which one is settled twice', 1, [],
		"SELECT idem_claim('KEY'); SELECT idem_claim('KEY.2');
		 SELECT idem_complete('KEY', '1'); SELECT idem_complete('KEY', '1')" ],
	[ 'a claim settled here, and one made elsewhere', 1, ["SELECT token FROM idem_claim('KEY')"],
		"SELECT idem_claim('KEY.2'); SELECT idem_complete('KEY', '1', TOKEN); SELECT idem_complete('KEY.2')" ],

	[ 'a claim in a savepoint that is released', 1, [],
		"SAVEPOINT a; SELECT idem_claim('KEY'); RELEASE a" ],
	[ 'a claim in a savepoint that is rolled back', 0, [],
		"SAVEPOINT a; SELECT idem_claim('KEY'); ROLLBACK TO a; INSERT INTO orders VALUES ('KEY')" ],
	[ 'a claim in a savepoint within one that is rolled back', 0, [],
		"SAVEPOINT a; SAVEPOINT b; SELECT idem_claim('KEY'); RELEASE b; ROLLBACK TO a;
		 INSERT INTO orders VALUES ('KEY')" ],
	[ 'a settlement in a savepoint that is released', 0, [],
		"SELECT idem_claim('KEY'); SAVEPOINT a; SELECT idem_complete('KEY'); RELEASE a" ],
	[ 'a settlement in a savepoint that is rolled back', 1, [],
		"SELECT idem_claim('KEY'); SAVEPOINT a; SELECT idem_complete('KEY'); ROLLBACK TO a" ],
	[ 'a settlement rolled back with its savepoint, then done again', 0, [],
		"SELECT idem_claim('KEY'); SAVEPOINT a; SELECT idem_complete('KEY'); ROLLBACK TO a;
		 SELECT idem_complete('KEY')" ],
	[ 'a claim and its settlement in different savepoints, the outer rolled back', 0, [],
		"INSERT INTO orders VALUES ('KEY'); SAVEPOINT a; SELECT idem_claim('KEY');
		 SAVEPOINT b; SELECT idem_complete('KEY'); RELEASE b; ROLLBACK TO a" ],
	[ 'an earlier claim settled in a savepoint that is rolled back', 0,
		["SELECT token FROM idem_claim('KEY')"],
		"SAVEPOINT a; SELECT idem_complete('KEY', '1', TOKEN); ROLLBACK TO a; INSERT INTO orders VALUES ('KEY')" ],
	[ 'an earlier claim settled in a savepoint that is released', 1,
		["SELECT token FROM idem_claim('KEY')"],
		"SAVEPOINT a; SAVEPOINT b; SELECT idem_complete('KEY', '1', TOKEN); RELEASE b; RELEASE a" ],
	[ 'a claim in a PL/pgSQL block whose exception is caught', 0, [],
		"INSERT INTO orders VALUES ('KEY');
		 DO \$\$ BEGIN PERFORM idem_claim('KEY'); RAISE division_by_zero;
			EXCEPTION WHEN division_by_zero THEN NULL; END \$\$" ],
	[ 'a claim before a PL/pgSQL block whose exception undoes the settlement', 1, [],
		"SELECT idem_claim('KEY');
		 DO \$\$ BEGIN PERFORM idem_complete('KEY'); RAISE division_by_zero;
			EXCEPTION WHEN division_by_zero THEN NULL; END \$\$" ],

	# Commands and messages are settled in the transaction that claims them.
	[ 'a command', 0, [], "SELECT idem_execute('KEY', 'INSERT INTO orders VALUES (''KEY'')')" ],
	[ 'a command that fails', 0, [], "SELECT idem_execute('KEY', 'INSERT INTO orders SELECT 1 / 0')" ],
	[ 'a command that takes over an ended lease', 0, ["SELECT token FROM idem_claim('KEY', lease => '1 ms')"],
		"SELECT idem_execute('KEY', 'SELECT 1')" ],
	[ 'a command that claims another key', 1, [], "SELECT idem_execute('KEY', 'SELECT idem_claim(''KEY.2'')')" ],
	[ 'a command that claims and settles another key', 0, [],
		"SELECT idem_execute('KEY', 'SELECT idem_claim(''KEY.2''), idem_complete(''KEY.2'')')" ],
	[ 'a command that claims another key and fails', 0, [],
		"SELECT idem_execute('KEY', 'SELECT 1 / (idem_claim(''KEY.2'') IS NULL)::int')" ],
	[ 'a command that settles an earlier claim', 1, ["SELECT token FROM idem_claim('KEY.2')"],
		"SELECT idem_execute('KEY', 'SELECT idem_complete(''KEY.2'', token => TOKEN)')" ],
	[ 'a command within another one', 0, [],
		"SELECT idem_execute('KEY', 'SELECT to_jsonb(idem_execute(''KEY.2'', ''SELECT 1''))')" ],
	[ 'a message', 0, [], "SELECT idem_once('KEY'); INSERT INTO orders VALUES ('KEY')" ],
	[ 'a message that takes an expired key', 0, ["SELECT idem_once('KEY', ttl => '1 ms'); SELECT pg_sleep(0.002)"],
		"SELECT idem_once('KEY')" ],
	[ 'messages', 0, [], "SELECT FROM idem_once_many('{KEY,KEY.2,KEY.3}')" ],
	[ 'a message and a claim', 1, [], "SELECT idem_once('KEY'); SELECT idem_claim('KEY.2')" ],

	[ 'a batch of claims', 1, [], "SELECT FROM idem_claim_many('{KEY,KEY.2}')" ],
	[ 'a batch of claims settled in its own transaction', 0, [],
		"SELECT FROM idem_claim_many('{KEY,KEY.2}'); SELECT idem_complete_many('{KEY.2,KEY}', NULL)" ],
	[ 'a batch of claims of which one is settled', 1, [],
		"SELECT FROM idem_claim_many('{KEY,KEY.2}'); SELECT idem_complete_many('{KEY.2}', NULL)" ],
	[ 'a batch of claims that are taken already', 0, ["SELECT idem_claim('KEY')"],
		"INSERT INTO orders VALUES ('KEY'); SELECT FROM idem_claim_many('{KEY}')" ],
	[ 'a batch of completions of an earlier claim and an own one', 1, ["SELECT token FROM idem_claim('KEY')"],
		"SELECT idem_claim('KEY.2'); SELECT idem_complete_many('{KEY.2,KEY}', '{NULL,TOKEN}')" ],
	[ 'a batch of completions rolled back with its savepoint', 0, ["SELECT token FROM idem_claim('KEY')"],
		"SAVEPOINT a; SELECT idem_complete_many('{KEY}', '{TOKEN}'); ROLLBACK TO a; INSERT INTO orders VALUES ('KEY')" ],

	[ 'a claim with idempotency.durable off', 0, [],
		"SET LOCAL idempotency.durable = off; SELECT idem_claim('KEY')" ],
	[ 'a completion with idempotency.durable off', 0, ["SELECT token FROM idem_claim('KEY')"],
		"SET LOCAL idempotency.durable = off; SELECT idem_complete('KEY', '1', TOKEN)" ],
);

freeze_writers($other);
my $number = 0;
foreach my $case (@commits)
{
	my ($name, $expected, $setup, $transaction) = @$case;
	my $key = 'commit.' . ++$number;
	my $token = 0;
	foreach my $sql (@$setup)
	{
		$token = $other->value($sql =~ s/KEY/$key/gr);
	}
	$s->value("BEGIN; $transaction" =~ s/KEY/$key/gr =~ s/TOKEN/$token/gr);
	$s->value('COMMIT');
	is(flushed() ? 'flushed' : 'not flushed', $expected ? 'flushed' : 'not flushed', $name);
}

# Each outside of a transaction block too, where a statement is its transaction.
$s->value(q{SELECT idem_claim('autocommit')});
ok(flushed(), 'a claim in a statement of its own is flushed');
$s->value(q{SELECT idem_claim('autocommit.2'), idem_complete('autocommit.2')});
ok(!flushed(), 'a claim and its settlement in one statement are not');
$s->value(q{SELECT idem_claim('autocommit')});
ok(!flushed(), 'nor does a duplicate flush what was written before it');
$s->value('ROLLBACK; SET synchronous_commit = on; INSERT INTO orders VALUES (0)');
ok(flushed(), 'with synchronous_commit on, everything is flushed');
down();

#
# The crash itself.
#
up();
freeze_writers($other);
my $token = $s->value(q{SELECT token FROM idem_claim('crash.claim', '{"a": 1}', lease => '1 h')});
$s->value(q{INSERT INTO orders VALUES ('crash.claim')});
down();
up();
is(status_of('crash.claim'), 'processing', 'a claim survives a crash after its commit');
is($s->value('SELECT count(*) FROM orders WHERE key = ' . sql_quote('crash.claim')), '0',
	'what was committed after it, and not flushed, does not');
is($s->value(q{SELECT outcome FROM idem_claim('crash.claim', '{"a": 2}')}), 'mismatch',
	'the claim survives with its request');

freeze_writers($other);
is($s->value("SELECT idem_complete('crash.claim', '{\"receipt\": 17}', $token, http_status => 201)"),
	't', 'its token still holds');
$s->value(q{INSERT INTO orders VALUES ('crash.claim')});
down();
up();
is($s->value(q{SELECT outcome, http_status, response FROM idem_claim('crash.claim', '{"a": 1}')}),
	'completed|201|{"receipt": 17}', 'a completion survives a crash after its commit');
is($s->value(q{SELECT count(*) FROM orders WHERE key = 'crash.claim'}), '0',
	'what was committed after it does not');

# One transaction: the order and the key, both or neither.
my $place_order = sub {
	my ($key) = @_;
	$s->value("BEGIN; SELECT idem_claim('$key'); INSERT INTO orders VALUES ('$key');
			   SELECT idem_complete('$key', '\"placed\"'); COMMIT");
};
my $both = sub {
	my ($key) = @_;
	return $s->value("SELECT count(*) FROM orders WHERE key = '$key'") . ' ' . status_of($key);
};

freeze_writers($other);
$place_order->('one.lost');
is($both->('one.lost'), '1 completed', 'an order and its key are committed');
down();
up();
is($both->('one.lost'), '0 absent', 'a crash before the flush loses both');
$place_order->('one.lost');
is($both->('one.lost'), '1 completed', 'and a retry places the order');

# The same with a command, and with a message.
my %work = (
	command => q{SELECT idem_execute('KEY', 'INSERT INTO orders VALUES (''KEY'')')},
	message => q{INSERT INTO orders SELECT 'KEY' WHERE idem_once('KEY')});
freeze_writers($other);
$s->value($work{$_} =~ s/KEY/$_.lost/gr) foreach sort keys %work;
is($both->("$_.lost"), '1 completed', "the work of a $_ and its key are committed") foreach sort keys %work;
down();
up();
foreach my $kind (sort keys %work)
{
	is($both->("$kind.lost"), '0 absent', "a crash before the flush loses both ($kind)");
	$s->value($work{$kind} =~ s/KEY/$kind.lost/gr) foreach 1 .. 2;
	is($both->("$kind.lost"), '1 completed', "and the work is done once afterwards ($kind)");
}
freeze_writers($other);
$s->value('SET synchronous_commit = on');
$s->value($work{$_} =~ s/KEY/$_.kept/gr) foreach sort keys %work;
down();
up();
is($both->("$_.kept"), '1 completed', "with synchronous_commit on, both survive ($_)") foreach sort keys %work;

freeze_writers($other);
$place_order->('one.kept');
$s->value(q{SELECT idem_claim('one.later')});
down();
up();
is($both->('one.kept'), '1 completed', 'a crash after a later flush keeps both');

#
# Every call, in one server life each: kept by default, lost without durability.
#
my %call = (
	claim => [ '', q{SELECT idem_claim('KEY')}, 'processing' ],
	complete => [ 'claim', q{SELECT idem_complete('KEY', '1', TOKEN)}, 'completed' ],
	fail => [ 'claim', q{SELECT idem_fail('KEY', '1', TOKEN)}, 'failed' ],
	retry => [ 'claim', q{SELECT idem_fail('KEY', '1', TOKEN, disposition => 'retry')}, 'retryable' ],
	unknown => [ 'claim', q{SELECT idem_fail('KEY', '1', TOKEN, disposition => 'unknown')}, 'unknown' ],
	renew => [ 'claim', q{SELECT idem_renew('KEY', TOKEN, '1 day')}, 'lease' ],
	checkpoint => [ 'claim', q{SELECT idem_checkpoint('KEY', TOKEN, 'halfway', '{"n": 1}')}, 'checkpoint' ],
	resolve => [ 'claim', q{SELECT idem_resolve('KEY', 'failed', '1')}, 'failed' ],
	forget => [ 'claim', q{SELECT idem_forget('KEY')}, 'absent' ],
	claim_many => [ '', q{SELECT FROM idem_claim_many('{KEY}')}, 'processing' ],
	complete_many => [ 'claim', q{SELECT idem_complete_many('{KEY}', '{TOKEN}', '{1}')}, 'completed' ],
);

# How a key stands, so that each call of %call can be told from its absence.
sub standing
{
	my ($key) = @_;
	my $row = $s->row("SELECT *, lease_until > clock_timestamp() + interval '1 h' AS long
					   FROM idem_get('$key')");
	return 'absent' unless defined $row->{status};
	return 'checkpoint' if defined $row->{checkpoint};
	return 'lease' if ($row->{long} || '') eq 't';
	return $row->{status};
}

foreach my $durable ('on', 'off')
{
	my %key = map { $_ => "call.$durable.$_" } sort keys %call;
	my %token = map { $_ => $call{$_}[0] ? $s->value("SELECT token FROM idem_claim('$key{$_}')") : 0 }
	  sort keys %call;

	freeze_writers($other);
	$s->value("SET idempotency.durable = $durable");
	foreach my $name (sort keys %call)
	{
		$s->value($call{$name}[1] =~ s/KEY/$key{$name}/r =~ s/TOKEN/$token{$name}/r);
		is(standing($key{$name}), $call{$name}[2], "durable $durable, $name: is done");
	}
	down();
	up();
	foreach my $name (sort keys %call)
	{
		my $before = $call{$name}[0] ? 'processing' : 'absent';
		is(standing($key{$name}), $durable eq 'on' ? $call{$name}[2] : $before,
			"durable $durable, $name: after the crash");
	}
}

#
# A claim whose owner is lost with the server.
#
$s->value(q{SELECT idem_claim('abandoned', lease => '2 s')});
down();
up();
is($s->value(q{SELECT outcome, attempt FROM idem_claim('abandoned', wait => '1 min')}), 'claimed|2',
	'a claim is taken over when its lease has ended, crash or no crash');

#
# Two-phase commit: what is prepared is flushed, and the key is held by it.
#
freeze_writers($other);
$s->value(q{BEGIN; SELECT idem_claim('prepared.commit'); INSERT INTO orders VALUES ('prepared.commit');
			PREPARE TRANSACTION 'c'});
ok(flushed(), 'PREPARE TRANSACTION is flushed');
$s->value(q{BEGIN; SELECT idem_claim('prepared.rollback'); PREPARE TRANSACTION 'r'});
$s->value(q{BEGIN; SELECT idem_claim('prepared.own'); SELECT idem_complete('prepared.own', '1');
			PREPARE TRANSACTION 'o'});
down();
up();
is($s->value("SELECT outcome FROM idem_claim('prepared.$_')"), 'processing',
	"a prepared claim is held through a crash ($_)")
  foreach qw(commit rollback own);
freeze_writers($other);
$s->value(q{COMMIT PREPARED 'c'});
$s->value(q{COMMIT PREPARED 'o'});
$s->value(q{ROLLBACK PREPARED 'r'});
is($s->value(q{SELECT outcome FROM idem_claim('prepared.rollback')}), 'claimed',
	'ROLLBACK PREPARED frees the key');
down();
up();
is($both->('prepared.commit'), '1 processing', 'COMMIT PREPARED keeps work and claim through a crash');
is($s->value(q{SELECT outcome FROM idem_claim('prepared.own')}), 'completed', 'and a settled claim');

#
# Tokens: above all earlier ones of claims that were committed.
#
my %highest;
foreach my $round (1 .. 3)
{
	freeze_writers($other);
	foreach my $n (1 .. 25)
	{
		my $key = 'token.' . $n % 5;
		my $new = $s->value("SELECT token FROM idem_claim('$key')");
		fail("token $new of $key comes after $highest{$key}") if $new <= ($highest{$key} || 0);
		$highest{$key} = $new;
		$s->value("SELECT idem_claim('token.own.$round.$n'), idem_complete('token.own.$round.$n')");
		$s->value("SELECT idem_forget('$key')");
	}
	down();
	up();
}
foreach my $key (sort keys %highest)
{
	cmp_ok($s->value("SELECT token FROM idem_claim('$key')"), '>', $highest{$key},
		"tokens of $key rise across crashes and deletions");
}

#
# kill -9 of one backend, which makes the server start anew, at every step of
# the work.  Then the client tries again.
#
my @steps = (
	[ 'BEGIN', 'BEGIN' ],
	[ 'claim', q{SELECT idem_claim('KEY', '{"amount": 5}')} ],
	[ 'work', q{INSERT INTO orders VALUES ('KEY')} ],
	[ 'complete', q{SELECT idem_complete('KEY', '"placed"')} ],
	[ 'COMMIT', 'COMMIT' ]);

sub kill_backend
{
	my ($victim) = @_;
	kill 'KILL', $victim->pid;
	# Every other session is thrown out; then it takes a moment to be back.
	$_->result foreach ($victim, $other);
	$s = session_again($node);
	$other = session($node);
	return;
}

# The client's retry, as it would be written in an application.
sub place_order_once
{
	my ($key) = @_;
	$s->value('BEGIN');
	my $outcome = $s->value(qq{SELECT outcome FROM idem_claim('$key', '{"amount": 5}')});
	if ($outcome eq 'claimed')
	{
		$s->value("INSERT INTO orders VALUES ('$key')");
		$s->value(qq{SELECT idem_complete('$key', '"placed"')});
	}
	$s->value('COMMIT');
	return $outcome;
}

foreach my $setting ('off', 'on')
{
	foreach my $killed_after (0 .. $#steps)
	{
		my $key = "kill.$setting.$killed_after";
		my $name = "synchronous_commit $setting, killed after $steps[$killed_after][0]";
		my $victim = session($node, options => { synchronous_commit => $setting });
		$victim->value($steps[$_][1] =~ s/KEY/$key/gr) foreach 0 .. $killed_after;
		kill_backend($victim);

		my $committed = $killed_after == $#steps && $setting eq 'on';
		my $seen = $both->($key);
		if ($killed_after == $#steps && $setting eq 'off')
		{
			like($seen, qr/^(?:1 completed|0 absent)$/, "$name: both or neither");
		}
		else { is($seen, $committed ? '1 completed' : '0 absent', "$name: both or neither"); }
		place_order_once($key);
		is($both->($key), '1 completed', "$name: a retry leaves one order");
		is(place_order_once($key), 'completed', "$name: and the next one is a replay");
	}
}

# The kill comes while the commit is on its way, or just after.
foreach my $round (1 .. 5)
{
	my $key = "kill.commit.$round";
	my $victim = session($node, options => { synchronous_commit => 'on' });
	$victim->value($steps[$_][1] =~ s/KEY/$key/gr) foreach 0 .. 3;
	$victim->send('COMMIT');
	sleep(0.0002 * ($round - 1));
	kill_backend($victim);
	like($both->($key), qr/^(?:1 completed|0 absent)$/, "killed within COMMIT, $round: both or neither");
	place_order_once($key);
	is($both->($key), '1 completed', "killed within COMMIT, $round: a retry leaves one order");
}

is($s->value('SELECT count(*) FROM (SELECT key FROM orders WHERE key LIKE ' . sql_quote('kill%')
		  . ' GROUP BY key HAVING count(*) > 1) d'), '0', 'no order was ever doubled');

no_faults($node);
$node->stop;
done_testing();
