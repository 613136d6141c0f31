# Sweeps among many sessions: what they delete while others claim, several at
# once, and what is left of one that is cancelled, killed or shut down.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $node = new_node('sweeping', conf => "max_connections = 50\nrestart_after_crash = on\n");
my $admin = session($node);

# N rows that have expired, and ten that have not.
sub fill
{
	my ($n) = @_;
	$admin->value('TRUNCATE idempotency_keys');
	$admin->value(qq{SELECT count(*) FROM idem_once_many(ARRAY(SELECT 'old-' || n FROM generate_series(1, $n) n), ttl => '1 ms')});
	$admin->value(q{SELECT count(*) FROM generate_series(1, 5) n, idem_claim('live-' || n, lease => '1 h', ttl => '1 ms')});
	$admin->value(q{SELECT count(idem_once('kept-' || n)) FROM generate_series(1, 5) n});
	wait_until(
		sub { $admin->value('SELECT count(*) FROM idempotency_keys WHERE expires_at > clock_timestamp()') eq '10' },
		'the rows to expire');
	return;
}

sub rows { return $admin->value('SELECT count(*) FROM idempotency_keys'); }

sub only_the_live
{
	my ($name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($admin->value(q{SELECT count(*), count(*) FILTER (WHERE key ~ '^(live|kept)') FROM idempotency_keys}), '10|10', $name);
	return;
}

# What the session's row in pg_stat_activity says.
sub activity
{
	my ($session, $column) = @_;
	my $pid = $session->pid;
	return $admin->value("SELECT $column FROM pg_stat_activity WHERE pid = $pid");
}

sub wait_for_pause
{
	my ($session) = @_;
	return wait_until(sub { activity($session, 'wait_event_type') eq 'Extension' }, 'the sweep to pause');
}

#
# Claims by 16 sessions while four others sweep
#
# A short-lived key is everybody's; who claims it has a lease, so that it is his
# until he completes it.  A kept one is claimed once, by one session.
{
	my $sessions = 16;
	my $rounds = 120;
	$admin->value(q{
CREATE TABLE kept (key text, token bigint, n int);
CREATE TABLE had (key text, token bigint);
CREATE PROCEDURE play(me int, rounds int) LANGUAGE plpgsql AS $$
DECLARE
	mine text;
	t bigint;
	fresh boolean;
BEGIN
	FOR n IN 1 .. rounds LOOP
		-- The clock of this session's sweeps goes by its transactions.
		mine := 'short-' || (random() * 1e6)::int % 40;
		SELECT token INTO t FROM idem_claim(mine, ttl => '1 ms', lease => '1 h') WHERE outcome = 'claimed';
		COMMIT;
		IF t IS NOT NULL THEN
			INSERT INTO had VALUES (mine, t);
			IF NOT idem_complete(mine, to_jsonb(n), t, ttl => '1 ms') THEN
				RAISE 'not completed: %', mine;
			END IF;
			COMMIT;
		END IF;

		mine := 'kept-' || me || '-' || n;
		SELECT token INTO t FROM idem_claim(mine, ttl => '1 ms', lease => '1 h');
		COMMIT;
		INSERT INTO kept VALUES (mine, t, n);
		PERFORM idem_complete(mine, to_jsonb(n), t, ttl => '1 h');
		COMMIT;
		PERFORM idem_once('once-' || me || '-' || n, ttl => '1 ms');
		COMMIT;
		-- One that has expired is claimed anew, and not swept while it is.
		PERFORM outcome FROM idem_claim('back-' || me, ttl => '1 ms', lease => '1 ms');
		ROLLBACK;
	END LOOP;
END $$});
	my @levels = ('read committed', 'repeatable read', 'serializable');
	my @players = map { session($node) } 1 .. $sessions;
	$players[$_]->value("SET default_transaction_isolation = '$levels[$_ % 3]'") foreach 0 .. $#players;
	my @sweepers = map { session($node) } 0 .. 3;
	my @calls = ('CALL idem_sweep_all(50)', 'CALL idem_sweep_all(1)', 'SELECT idem_sweep(7)', 'CALL idem_sweep_all()');
	$sweepers[$_]->value("SET default_transaction_isolation = '$levels[$_ % 3]'") foreach 0 .. $#sweepers;

	my (%errors, $swept);
	$players[$_]->send("CALL play($_, $rounds)") foreach 0 .. $#players;
	$sweepers[$_]->send($calls[$_]) foreach 0 .. $#sweepers;
	while (grep { !$_->is_done } @players)
	{
		foreach my $i (grep { $sweepers[$_]->is_done } 0 .. $#sweepers)
		{
			my $result = $sweepers[$i]->result;
			$errors{"$result->{error}{C} $result->{error}{M}"}++ if $result->{error};
			$swept++;
			$sweepers[$i]->send($calls[$i]);
		}
		sleep(0.001);
	}
	foreach my $session (@players, @sweepers)
	{
		my $error = $session->result->{error};
		$errors{"$error->{C} $error->{M}"}++ if $error;
	}
	is(join('; ', sort keys %errors), '', 'claims and sweeps: no session has had an error');
	cmp_ok($swept, '>', 10, "there were $swept sweeps meanwhile");
	is($admin->value('SELECT count(*) FROM kept'), $sessions * $rounds, 'every session has played');
	is($admin->value(
			q{SELECT count(*) FROM kept FULL JOIN (SELECT * FROM idempotency_keys WHERE key LIKE 'kept-%') k USING (key)
			  WHERE k.token IS DISTINCT FROM kept.token OR k.response IS DISTINCT FROM to_jsonb(kept.n) OR k.status <> 'completed'}),
		'0', 'no kept row is missing, each is its owner\'s');
	is($admin->value('SELECT count(*) FROM (SELECT token FROM had GROUP BY token HAVING count(*) > 1) twice'), '0', 'no key had two owners');
	wait_until(
		sub {
			$admin->value('CALL idem_sweep_all()');
			$admin->value(q{SELECT count(*) FROM idempotency_keys WHERE key NOT LIKE 'kept-%'}) eq '0';
		},
		'the rest to be swept');
	is(rows(), $sessions * $rounds, 'and nothing else is left');
	is($admin->value(q{SELECT count(*) FROM pg_locks WHERE locktype IN ('advisory', 'tuple') AND database <> 0}), '0', 'no lock is left');
	is($admin->value('SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()'), '0', 'there was no deadlock');
	$_->close foreach @players, @sweepers;
}

#
# Four sweeps of the same backlog: each row goes once
#
{
	fill(20000);
	# Sessions that have ended tell of their deletions at their end.
	wait_until(
		sub { $admin->value(q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'}) eq '1' },
		'the others to be gone');
	$admin->value('SELECT pg_stat_force_next_flush()');
	my $before = $admin->value(q{SELECT pg_stat_get_tuples_deleted('idempotency_keys'::regclass)});
	my @sweepers = map { session($node) } 1 .. 4;
	$_->send('CALL idem_sweep_all(100)') foreach @sweepers;
	is(join('', map { $_->result->{error} ? 'failed' : '' } @sweepers), '', 'four sweeps at once');
	only_the_live('have swept it all, and no more');
	$_->close foreach @sweepers;
	wait_until(
		sub { $admin->value(qq{SELECT pg_stat_get_tuples_deleted('idempotency_keys'::regclass) - $before >= 20000}) eq 't' },
		'the statistics to arrive');
	is($admin->value(qq{SELECT pg_stat_get_tuples_deleted('idempotency_keys'::regclass) - $before}), '20000', 'each row once');
}

#
# What can be seen of a sweep, and what it stands in the way of
#
{
	fill(2000);
	my $sweeper = session($node);
	$sweeper->value(q{SET log_min_messages = notice});
	$sweeper->send(q{CALL idem_sweep_all(10, pause => '1 s')});
	wait_for_pause($sweeper);
	like(activity($sweeper, 'query'), qr/^CALL idem_sweep_all\(\): \d+ of about 200\d expired rows deleted$/, 'pg_stat_activity says how far it is');
	is(activity($sweeper, q{state}), 'active', 'as active');
	if ($admin->value(q{SELECT current_setting('server_version_num')::int >= 170000}) eq 't')
	{
		is(activity($sweeper, 'wait_event'), 'IdempotencySweepPause', 'the pause has a name');
	}
	wait_for_pause($sweeper);
	is(activity($sweeper, 'backend_xmin IS NULL AND backend_xid IS NULL'), 't', 'a sweep that pauses holds no snapshot');
	my $pid = $sweeper->pid;
	wait_for_pause($sweeper);
	is($admin->value("SELECT count(*) FROM pg_locks WHERE pid = $pid AND locktype = 'relation'"), '0', 'and no lock');
	like($node->safe_psql('postgres', 'SET lock_timeout = 5000; VACUUM idempotency_keys; BEGIN; LOCK TABLE idempotency_keys; SELECT count(*) > 10 FROM idempotency_keys'),
		qr/^t$/m, 'so nobody waits for it');
	wait_until(sub { slurp_file($node->logfile) =~ /NOTICE:  \d+ of about 200\d expired rows deleted/ }, 'a NOTICE of the progress');
	pass('a NOTICE tells of the progress');
	$admin->value("SELECT pg_cancel_backend($pid)");
	is($sweeper->result->{error}{C}, '57014', 'cancelled while it pauses');
	my $left = rows();
	cmp_ok($left, '<', 2010, "what it had deleted stays deleted ($left rows left)");
	$sweeper->value('CALL idem_sweep_all()');
	only_the_live('and the same session goes on with the rest');
}

#
# What it deletes is counted with each batch, whatever becomes of the sweep
#
sub counted { return $admin->value("SELECT $_[0] FROM idempotency_stats"); }

{
	fill(50);
	$admin->value('SELECT idem_stats_reset()');
	$admin->value('SELECT pg_sleep(3)');
	my $sweeper = session($node);
	$sweeper->send(q{CALL idem_sweep_all(10, pause => '1 h')});
	wait_for_pause($sweeper);
	is(counted('swept_rows, sweep_runs, last_sweep_at'), '10|0|', 'a batch is counted while the sweep goes on');
	is($admin->value(
			q{SELECT value < extract(epoch FROM clock_timestamp() - stats_reset) - 2
			  FROM idem_health(), idempotency_stats WHERE item = 'sweep_overdue'}),
		't', 'and nobody is late while batches end');
	my $pid = $sweeper->pid;
	$admin->value("SELECT pg_terminate_backend($pid)");
	wait_until(sub { $admin->value("SELECT count(*) FROM pg_stat_activity WHERE pid = $pid") eq '0' }, 'the sweep to end');
	is(counted('swept_rows, sweep_runs') . '|' . rows(), '10|0|50', 'a sweep that is terminated has counted what it has deleted');
	$admin->value('CALL idem_sweep_all(15)');
	is(counted('swept_rows, sweep_runs, last_sweep_rows'), '50|1|40', 'and one that ends is a run, whose rows are counted once');

	fill(50);
	$admin->value('SELECT idem_stats_reset()');
	$admin->value('CREATE TABLE looped AS SELECT 1 AS n');
	like($admin->query(
		q{DO $$ DECLARE i int; BEGIN FOR i IN UPDATE looped SET n = 2 RETURNING n LOOP CALL idem_sweep_all(10); END LOOP; END $$})->{error}{M},
		qr/cannot perform transaction commands inside a cursor loop/, 'a loop that lets nobody commit');
	is(counted('swept_rows, sweep_runs, sweep_errors'), '0|0|0', 'is no run, and no error of one');
}

#
# Cut short
#
{
	fill(2000);
	my $sweeper = session($node);
	$sweeper->value(q{SET statement_timeout = '300ms'});
	is_sqlstate($sweeper, q{CALL idem_sweep_all(10, pause => '20 ms')}, '57014', 'statement_timeout ends it');
	cmp_ok(rows(), '<', 2010, 'what it had deleted stays deleted');
	$sweeper->value(q{SET statement_timeout = 0});

	$sweeper->send(q{CALL idem_sweep_all(10, pause => '1 h')});
	wait_for_pause($sweeper);
	$admin->value('DROP EXTENSION idempotency; CREATE EXTENSION idempotency; DROP EXTENSION idempotency');
	pass('DROP EXTENSION does not wait for a sweep that pauses');
	$admin->value('SELECT pg_cancel_backend(' . $sweeper->pid . ')');
	is($sweeper->result->{error}{C}, '57014', 'which is cancelled');
	$admin->value('CREATE EXTENSION idempotency');

	fill(200);
	$sweeper->send(q{CALL idem_sweep_all(10, pause => '200 ms')});
	wait_for_pause($sweeper);
	$admin->value('DROP EXTENSION idempotency');
	is($sweeper->result->{error}{C}, '42704', 'or finds nothing more to sweep');
	$admin->value('CREATE EXTENSION idempotency');
	fill(200);
	$sweeper->value('CALL idem_sweep_all(10)');
	only_the_live('the session sweeps the new one');

	# A table that is locked for a moment, as VACUUM does it.
	fill(200);
	$sweeper->send(q{CALL idem_sweep_all(10, pause => '200 ms')});
	wait_for_pause($sweeper);
	$admin->value('BEGIN; LOCK TABLE idempotency_keys');
	sleep(0.5);
	$admin->value('COMMIT');
	is($sweeper->result->{error}, undef, 'a sweep that finds the table locked tries again');
	only_the_live('and ends when all is done');

	# A configuration reload, or whatever else sets its latch, is no end of the pause.
	fill(20);
	$sweeper->send(q{CALL idem_sweep_all(15, pause => '1 h')});
	wait_for_pause($sweeper);
	$node->reload;
	$admin->value(q{SELECT pg_log_backend_memory_contexts(} . $sweeper->pid . ')');
	wait_until(sub { slurp_file($node->logfile) =~ /logging memory contexts of PID ${\ $sweeper->pid}/ }, 'its latch to be set');
	is(rows(), '15', 'the pause goes on');
	$sweeper->close;
}

#
# kill -9 of the backend, in the middle of its batches
#
foreach my $round (1 .. 3)
{
	fill(20000);
	my $sweeper = session($node);
	$sweeper->send(q{CALL idem_sweep_all(10, pause => '5 ms')});
	wait_until(sub { rows() < 19000 }, 'the sweep to be under way');
	kill 'KILL', $sweeper->pid;
	is($sweeper->result->{error}{C}, '08006', 'the backend is killed');
	# Which the server notices after a moment, and ends all others.
	wait_until(sub { $admin->query('SELECT 1')->{error} }, 'the server to go down');
	$admin = session_again($node);
	my $left = rows();
	cmp_ok($left, '>', 10, "in the middle: $left rows are left");
	is($admin->value(q{SELECT count(*) FROM idempotency_keys WHERE key ~ '^(live|kept)'}), '10', 'all that are live among them');
	$admin->value('CALL idem_sweep_all()');
	only_the_live('and the next sweep does the rest');
}

#
# Rows behind which somebody's code would wait: ten waits of a millisecond are the
# most in one of many batches, since others may wait for what it has locked.
#
{
	fill(1);
	my $holder = session($node);
	$admin->value('CREATE TABLE child (scope text, key text, FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE CASCADE)');
	$admin->value(q{SELECT count(*) FROM idem_once_many(ARRAY(SELECT 'child-' || n FROM generate_series(1, 30) n), ttl => '1 ms')});
	$admin->value(q{INSERT INTO child SELECT scope, key FROM idempotency_keys WHERE key ~ '^child'});
	$admin->value(q{SELECT pg_sleep(0.05), idem_once('last', ttl => '1 ms')});
	wait_until(sub { $admin->value(q{SELECT max(expires_at) < clock_timestamp() - interval '20 ms' FROM idempotency_keys WHERE key ~ '^(child|last)'}) eq 't' },
		'the rows to expire');
	$holder->value('BEGIN; SELECT FROM child FOR UPDATE');
	$admin->value('CALL idem_sweep_all(max_batches => 1)');
	is($admin->value(q{SELECT count(*) FILTER (WHERE key ~ '^old'), count(*) FILTER (WHERE key = 'last') FROM idempotency_keys}),
		'0|1', 'a batch with rows that have to be waited for deletes what comes before, and does not wait for all of them');
	$admin->value('CALL idem_sweep_all()');
	is($admin->value(q{SELECT count(*), count(*) FILTER (WHERE key = 'last') FROM idempotency_keys WHERE key ~ '^(child|last)'}),
		'30|0', 'the next batch goes on behind them');
	$admin->value(q{SELECT pg_sleep(0.05), idem_once('last', ttl => '1 ms'), pg_sleep(0.05)});
	is($admin->value('SELECT idem_sweep()'), '1', 'a single batch, behind which none comes, gets behind them, too');
	$holder->value('COMMIT');

	# That has its limit, of which it tells.
	$admin->value(q{SELECT count(*) FROM idem_once_many(ARRAY(SELECT 'many-' || n FROM generate_series(1, 1500) n), ttl => '1 ms')});
	$admin->value(q{INSERT INTO child SELECT scope, key FROM idempotency_keys WHERE key ~ '^many'});
	$admin->value(q{SELECT pg_sleep(0.05)});
	$holder->value('BEGIN; SELECT FROM child FOR UPDATE');
	is($admin->value('SELECT idem_sweep()'), '0', 'it tries a thousand of them');
	like(slurp_file($node->logfile), qr/WARNING:  skipped expired idempotency keys because of locks on what refers to them/, 'and says that there are more');
	$holder->value('COMMIT');
	$admin->value('CALL idem_sweep_all()');
	only_the_live('and when nobody has them locked, they go');
	$admin->value('DROP TABLE child');
}

#
# With logical decoding a deletion needs the replica identity's index, of which a
# new session knows nothing.  If somebody has it locked, the sweep goes without,
# and keeps nobody from the page.
#
{
	my $logical = new_node('logical', conf => "wal_level = logical\n");
	my ($owner, $sweeper) = map { session($logical) } 1 .. 2;
	$owner->value(q{SELECT idem_once('a', ttl => '1 ms')});
	wait_until(sub { $owner->value('SELECT min(expires_at) < clock_timestamp() - interval $$20 ms$$ FROM idempotency_keys') eq 't' },
		'the row to expire');
	$owner->value('BEGIN; ALTER INDEX idempotency_keys_pkey SET TABLESPACE pg_default');
	is($sweeper->value('SELECT idem_sweep()'), '0', 'logical: a sweep skips what it would have to wait for');
	is($owner->value('SELECT count(*) FROM idempotency_keys'), '1', 'logical: and holds nobody up');
	$owner->value('COMMIT');
	is($sweeper->value('SELECT idem_sweep()'), '1', 'logical: the next one does it');
	no_faults($logical);
	$logical->stop;
}

#
# A shutdown does not wait for a pause
#
{
	fill(100);
	my $sweeper = session($node);
	$sweeper->send(q{CALL idem_sweep_all(10, pause => '1 h')});
	wait_for_pause($sweeper);
	$node->stop('fast');
	is($sweeper->result->{error}{C}, '57P01', 'a fast shutdown ends it with the usual error');
}

no_faults($node);
done_testing();
