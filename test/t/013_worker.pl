# The background worker: what it sweeps and when, what it must not stand in the
# way of, and what must not stop it.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use IdemTest::Worker;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $worker_conf = <<'CONF';
idempotency.worker = on
idempotency.naptime = 1
max_connections = 40
max_worker_processes = 8
restart_after_crash = on
CONF

my $node = new_node('worker', extension => 0, conf => $worker_conf);
my $admin = session($node);

sub processes
{
	my ($kind, $session) = @_;
	return $session->value("SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency $kind'");
}

# Until the worker has shown in another database that it has gone round since.
sub another_round
{
	my ($session) = @_;
	make_expired($session, 1);
	wait_until(sub { expired($session) eq '0' }, 'another round of the worker');
	return;
}

#
# Before CREATE EXTENSION, and with it.
#
wait_until(sub { processes('launcher', $admin) ne '' }, 'the launcher to run');
# While it reads pg_database it is in one.
wait_until(
	sub { $admin->value(q{SELECT count(*), count(datname), count(backend_xmin), count(xact_start)
		FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'}) eq '1|0|0|0' },
	'the launcher to rest');
pass('the launcher is connected to no database, and rests in no transaction');
is($admin->value(q{SELECT wait_event FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'}),
	$admin->value('SHOW server_version_num') >= 170000 ? 'IdempotencyLauncherMain' : 'Extension', 'its wait has a name');
$admin->value("CREATE DATABASE one");
$admin->value("CREATE DATABASE two");
my ($one, $two) = map { session($node, dbname => $_) } qw(one two);

$one->value('CREATE EXTENSION idempotency');
make_expired($one, 10);
swept($one, 'a database whose extension was created just now');
is(complaints($node), '', 'nothing but that in the log');

$one->value('BEGIN; CREATE SCHEMA s; DROP EXTENSION idempotency; CREATE EXTENSION idempotency SCHEMA s; ROLLBACK');
$two->value('CREATE SCHEMA s; CREATE EXTENSION idempotency SCHEMA s; SET search_path = s');
make_expired($two, 5000);
$one->value(q{SELECT idem_claim('held', ttl => '1 ms', lease => '1 h')});
$one->value(q{SELECT idem_once('kept', ttl => '1 h')});
make_expired($one, 10);
swept($two, 'another schema, several batches');
swept($one, 'the first database once more');
is($one->value(q{SELECT string_agg(key, ',' ORDER BY key) FROM idempotency_keys}), 'held,kept', 'and what has not expired is there');

# Deletions are counted for autovacuum.
wait_until(
	sub { $two->value(q{SELECT n_tup_del FROM pg_stat_user_tables WHERE relname = 'idempotency_keys'}) >= 5000 },
	'the statistics of the table');
pass('autovacuum hears of the deletions');

# No extension any more: silence.
$one->value('DROP EXTENSION idempotency');
another_round($two) for 1 .. 3;
$one->value('CREATE EXTENSION idempotency');
make_expired($one, 10);
swept($one, 'an extension that was dropped and created');
is(complaints($node), '', 'nothing in the log');

#
# It can be turned off and on, confined to databases, and to a time of day.
#
sub stays
{
	my ($session, $witness, $name) = @_;
	my $before = expired($session);
	another_round($witness) for 1 .. 2;
	return is(expired($session), $before, $name);
}

set($admin, 'idempotency.databases' => 'postgres, two');
another_round($two);
make_expired($one, 3);
stays($one, $two, 'a database that is not in idempotency.databases');
set($admin, 'idempotency.databases' => 'postgres, "one"');
swept($one, 'one that is in it');
set($admin, 'idempotency.databases' => undef);
another_round($two);

# The launcher has read its settings when it has set its latch's timeout; what
# it does next is seen by the number of sweepers it starts.
sub no_sweeper_for
{
	my ($setting, $name) = @_;
	set($admin, %$setting);

	# A process that reloads its settings after the launcher may see them before.
	my $seen = $admin->value('SELECT count(*) FROM pg_stat_activity');
	make_expired($one, 3);
	my $until = time() + 2.5;
	my $left = '3';
	while (time() < $until) { $left = expired($one); $admin->value('SELECT pg_sleep(0.1)'); }
	return is($left, '3', $name);
}

sub settle
{
	$admin->value('SELECT pg_sleep(1.5)');
	swept($one, $_[0]);
	return;
}

set($admin, 'idempotency.worker' => 'off');
$admin->value('SELECT pg_sleep(0.5)');
no_sweeper_for({}, 'nothing is swept while idempotency.worker is off');
set($admin, 'idempotency.worker' => 'on');
swept($one, 'idempotency.worker = on');

# A window of four hours that ends two hours ago, and one around now.
sub clock { return $admin->value("SELECT to_char(now() AT TIME ZONE 'Pacific/Auckland' + '$_[0] min', 'HH24:MI')"); }

set($admin, timezone => 'Pacific/Auckland', 'idempotency.sweep_window' => clock(-360) . '-' . clock(-120));
$admin->value('SELECT pg_sleep(0.5)');
no_sweeper_for({}, 'nothing is swept outside the window');

# But health is looked at.
sub held_key
{
	my ($key) = @_;
	$one->value("SELECT idem_claim('$key', lease => '1 ms', takeover => false)");
	return wait_until(sub { $one->value("SELECT status FROM idem_get('$key')") eq 'unknown' }, 'the key to be held');
}

my $runs = $one->value('SELECT sweep_runs FROM idempotency_stats');
held_key('watched');
wait_until(sub { log_count($node, 'WARNING:  idempotency keys in database "one" need attention: keys held until') == 1 },
	'the warning of a held key');
$one->value(q{SELECT idem_resolve('watched', 'failed')});
wait_until(sub { log_count($node, 'LOG:  item "held_unknown" of idem_health\(\) in database "one" is well again') == 1 },
	'the line that tells that it is well');
is($one->value('SELECT sweep_runs FROM idempotency_stats'), $runs, 'what is bad is in the log, and nothing was swept for it');
is($one->value('SELECT idem_sweep()'), '3', 'nor before it is by hand');
make_expired($one, 3);
set($admin, 'idempotency.sweep_window' => clock(-120) . '-' . clock(120));
swept($one, 'inside the window');
set($admin, timezone => undef, 'idempotency.sweep_window' => undef);
is_sqlstate($admin, q{ALTER SYSTEM SET idempotency.sweep_window = '01:00-01:00'}, '22023', 'a window that never opens');
is_sqlstate($admin, q{SET idempotency.naptime = '1 h'}, '55P02', 'the worker is the server\'s, not the session\'s');
is(complaints($node) =~ s/^.*(?:sweep_window|naptime|ends when it begins|keys held until).*\n?//mgr, '', 'nothing else in the log');

#
# What a database or a role has set.
#
my $role = $admin->value('SELECT current_user');
foreach my $setting ('default_transaction_read_only = on', q{statement_timeout = '1 ms'}, q{lock_timeout = '1 ms'},
	'default_transaction_isolation = serializable', 'search_path = nowhere', 'role = pg_monitor',
	q{idle_in_transaction_session_timeout = '1 ms'}, 'synchronous_commit = remote_apply', 'row_security = off')
{
	$admin->value("ALTER DATABASE one SET $setting");
	$admin->value("ALTER ROLE $role SET $setting");
}
$one->close;
$one = session($node, dbname => 'one', options => { default_transaction_read_only => 'off', statement_timeout => 0,
	lock_timeout => 0, search_path => 'public', role => 'none', idle_in_transaction_session_timeout => 0 });
make_expired($one, 3000);
swept($one, 'a database with settings that would be in the way');
$admin->value("ALTER DATABASE one RESET ALL; ALTER ROLE $role RESET ALL");
$one->close;
$one = session($node, dbname => 'one');

#
# One database's error is said once, and does not stop the others.
#
my $offset = log_size($node);
$one->value('ALTER TABLE idempotency_keys ALTER COLUMN due_at DROP NOT NULL');
make_expired($two, 5);
swept($two, 'another database while one has an error');
wait_until(sub { log_count($node, 'WARNING:  could not sweep', $offset) > 0 }, 'the warning');
another_round($two) for 1 .. 3;
is(log_count($node, 'WARNING:  could not sweep expired idempotency keys in database "one"', $offset), 1, 'one warning');
is(log_count($node, 'ERROR:', $offset), 0, 'and no error');
$one->value('ALTER TABLE idempotency_keys ALTER COLUMN due_at SET NOT NULL');
make_expired($one, 5);
swept($one, 'the database is repaired');
wait_until(sub { log_count($node, 'LOG:  expired idempotency keys in database "one" are swept again', $offset) == 1 },
	'the line that tells that it is well');
pass('which the log tells');

# What is bad is said by the visit that finds it: with a naptime of an hour there
# is no other.
sub visit_once
{
	$one->value('SELECT idem_stop_worker()');
	$_[0]->();
	$one->value('SELECT idem_start_worker()');
	return;
}

sub says
{
	my ($pattern) = @_;
	wait_until(sub { log_count($node, $pattern, $offset) > 0 }, $pattern);
	return is(log_count($node, $pattern, $offset), 1, "one visit, one line: $pattern");
}

my $bad = 'WARNING:  idempotency keys in database "one" need attention: ';
my $well = 'LOG:  item "%s" of idem_health\(\) in database "one" is well again';
wait_until(sub { log_count($node, "${bad}the last sweep failed") == log_count($node, sprintf $well, 'sweep_failing') },
	'all that was bad to be well');
$offset = log_size($node);
set($admin, 'idempotency.naptime' => '1 h');
wait_until(sub { $admin->value('SHOW idempotency.naptime') eq '1h' }, 'the long naptime');
visit_once(sub { $one->value(q{BEGIN; SELECT idem_once('said', ttl => '1 ms');
	CREATE TABLE refers (scope text COLLATE "C", key text COLLATE "C", FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
	INSERT INTO refers VALUES ('', 'said'); COMMIT; SELECT pg_sleep(0.01)}) });
says("${bad}the last sweep failed: .*refers");
visit_once(sub { $one->value('DROP TABLE refers') });
says(sprintf $well, 'sweep_failing');

# A visit that fails tells of all the rest.
$offset = log_size($node);
visit_once(sub {
	make_expired($one, 1);
	$one->value(q{ALTER DATABASE one SET idempotency.health_stuck_after = 0; ALTER DATABASE one SET idempotency.health_stuck_claims = 0});
	$one->value(q{SELECT idem_claim('forgotten', lease => '1 ms'), pg_sleep(0.01); DROP INDEX idempotency_keys_due_at_idx}) });
says("${bad}open claims");
says("${bad}the last sweep failed: .*has no index");
says('WARNING:  could not sweep expired idempotency keys in database "one"');
visit_once(sub {
	$one->value('CREATE INDEX idempotency_keys_due_at_idx ON idempotency_keys (due_at)');
	$one->value(q{SELECT idem_resolve('forgotten', 'failed')}) });
says(sprintf $well, $_) foreach 'stuck_claims', 'sweep_failing';
is(log_count($node, $bad, $offset), 2, 'the first visit that succeeds does not tell of what was');
$one->value('ALTER DATABASE one RESET ALL');
set($admin, 'idempotency.naptime' => undef);
wait_until(sub { $admin->value('SHOW idempotency.naptime') eq '1s' }, 'the short naptime');

# A row that can't be deleted.
$offset = log_size($node);
make_expired($one, 1);
$one->value(q{BEGIN; SELECT idem_once('referred-x', ttl => '1 ms'); SELECT idem_once('late-' || i, ttl => '1 ms') FROM generate_series(1, 20) i;
	CREATE TABLE refers (scope text COLLATE "C", key text COLLATE "C", FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
	INSERT INTO refers VALUES ('', 'referred-x'); COMMIT});
wait_until(sub { expired($one) eq '1' }, 'the rows that can be deleted');
another_round($two) for 1 .. 3;
is(log_count($node, 'WARNING:  could not delete all expired', $offset), 1, 'a row that cannot be deleted: one warning, and the others are gone');
$one->value('DROP TABLE refers');
swept($one, 'the row that was referred to');
wait_until(sub { log_count($node, 'are swept again', $offset) == 1 }, 'the line that tells that it is well');

# A locked table is skipped, not waited for.
$offset = log_size($node);
make_expired($one, 5);
$one->value('BEGIN; LOCK idempotency_keys');
another_round($two) for 1 .. 2;
$one->value('COMMIT');
swept($one, 'a table that was locked');
is(complaints($node, $offset), '', 'without a word');

# Nor is an index waited for, by the sweep or by the look at health: that would
# take until the launcher gives the sweeper up, after a minute.
$admin->value("ALTER DATABASE one SET lock_timeout = '1 h'");
foreach my $index ('idempotency_keys_pkey', 'idempotency_keys_due_at_idx')
{
	make_expired($one, 5);
	$one->value("BEGIN; REINDEX INDEX $index");
	another_round($two) for 1 .. 3;
	pass("another database is swept during REINDEX INDEX $index");
	$one->value('ROLLBACK');
	swept($one, 'and that one after it');
}
$admin->value('ALTER DATABASE one RESET lock_timeout');
is(complaints($node, $offset), '', 'without a word');

#
# DDL on the database while it sweeps a backlog that never ends: nothing is
# refused, or waits for long.  A pause makes the sweepers stay connected.
#
$offset = log_size($node);
set($admin, 'idempotency.sweep_pause' => '20 ms', 'idempotency.sweep_batch_size' => 5);
my $slowest = 0;

sub quick
{
	my ($session, $sql) = @_;
	my $begin = time();
	$session->value($sql);
	my $took = time() - $begin;
	$slowest = $took if $took > $slowest;
	return;
}

foreach my $round (1 .. 5)
{
	$admin->value('CREATE DATABASE busy');
	my $busy = session($node, dbname => 'busy');
	$busy->value('CREATE EXTENSION idempotency');
	make_expired($busy, 5000);
	sweeping($admin, 'busy');
	if ($round == 1)
	{
		wait_until(
			sub {
				$admin->value(q{SELECT query FROM pg_stat_activity WHERE backend_type = 'idempotency sweeper' AND datname = 'busy'})
				  =~ /^idempotency sweeper: \d+ of about [1-9]\d* expired rows deleted$/;
			},
			'the progress in pg_stat_activity');
		pass('pg_stat_activity tells how far it is');
	}
	quick($busy, 'DROP EXTENSION idempotency');
	$busy->value('CREATE EXTENSION idempotency');
	make_expired($busy, 5000);
	$busy->close;
	wait_until(sub { $admin->value(q{SELECT count(*) FROM pg_stat_activity WHERE datname = 'busy' AND backend_type = 'client backend'}) eq '0' },
		'our own session to be gone');
	sweeping($admin, 'busy');
	quick($admin, 'ALTER DATABASE busy RENAME TO busy2');
	sweeping($admin, 'busy2');
	quick($admin, 'CREATE DATABASE copy TEMPLATE busy2');
	sweeping($admin, 'busy2');
	quick($admin, 'DROP DATABASE busy2');
	sweeping($admin, 'copy');
	quick($admin, $round % 2 ? 'DROP DATABASE copy' : 'DROP DATABASE copy WITH (FORCE)');
}
is(complaints($node, $offset), '', 'DROP, RENAME, TEMPLATE, DROP EXTENSION: none refused, nothing in the log');
note(sprintf 'the slowest took %.2f s', $slowest);

# A DROP that comes when the launcher has locked the database for a sweeper that
# is not connected yet, and has to let it go before: a postmaster that is stopped
# starts none.
$admin->value('CREATE DATABASE queued');
my $queued = session($node, dbname => 'queued');
$queued->value('CREATE EXTENSION idempotency');
make_expired($queued, 3);
swept($queued, 'a database that will be dropped');
set($admin, 'idempotency.databases' => 'queued');
another_round($queued) for 1 .. 2;
$queued->close;
$queued = session($node);
my $postmaster = freeze_launcher($node, $admin);
$queued->send('DROP DATABASE queued');
wait_until(
	sub {
		$admin->value(q{SELECT count(*) FROM pg_locks WHERE NOT granted AND classid = 'pg_database'::regclass
			AND objid = (SELECT oid FROM pg_database WHERE datname = 'queued')}) eq '1';
	},
	'the DROP to wait for it');
kill 'CONT', $postmaster;
$queued->fetch;
pass('a DROP behind the launcher\'s lock does not hold the sweeper up');
$queued->close;
is(complaints($node, $offset), '', 'and does not end it');
set($admin, 'idempotency.databases' => undef);

# An interrupted DROP DATABASE, and a database that allows no connections.
$admin->value('CREATE DATABASE closed');
my $closed = session($node, dbname => 'closed');
$closed->value('CREATE EXTENSION idempotency');
make_expired($closed, 3);
swept($closed, 'a database that will be closed');
$admin->value('ALTER DATABASE closed ALLOW_CONNECTIONS false');
make_expired($closed, 3);
stays($closed, $two, 'one that allows no connections is left alone');
$admin->value('ALTER DATABASE closed ALLOW_CONNECTIONS true');
$admin->value('ALTER DATABASE closed CONNECTION LIMIT 0');
swept($closed, 'one that allows no more connections but a superuser\'s');
$admin->value(q{UPDATE pg_database SET datconnlimit = -2 WHERE datname = 'closed'});
make_expired($closed, 3);
stays($closed, $two, 'one whose DROP DATABASE was interrupted is left alone');
$closed->close;
wait_until(sub { $admin->value(q{SELECT count(*) FROM pg_stat_activity WHERE datname = 'closed'}) eq '0' }, 'our session to be gone');
$admin->value('DROP DATABASE closed');
is(complaints($node, $offset), '', 'and nothing of it is in the log');

# Fast shutdown while it sweeps.
$slowest = 0;
foreach my $round (1 .. 5)
{
	make_expired($one, 2000);
	sweeping($admin, 'one');
	$_->close foreach $admin, $one, $two;
	my $begin = time();
	$node->stop('fast');
	my $took = time() - $begin;
	$slowest = $took if $took > $slowest;
	$node->start;
	($admin, $one, $two) = map { session($node, dbname => $_) } qw(postgres one two);
	$two->value('SET search_path = s');
}
note(sprintf 'the slowest shutdown took %.2f s', $slowest);
is(complaints($node, $offset), '', 'and leaves nothing in the log');
set($admin, 'idempotency.sweep_pause' => undef, 'idempotency.sweep_batch_size' => undef);
swept($one, 'the backlog in the end');

# SIGTERM: whoever is ended comes back.
my $launcher = processes('launcher', $admin);
$admin->value("SELECT pg_terminate_backend($launcher)");
wait_until(sub { processes('launcher', $admin) !~ /^(?:$launcher)?$/ }, 'another launcher');
make_expired($one, 3);
swept($one, 'by the next launcher');
is(complaints($node, $offset), '', 'without a word');

# A sweeper that is terminated has counted what it has deleted.
$one->value('SELECT idem_stats_reset()');
set($admin, 'idempotency.sweep_pause' => '200 ms', 'idempotency.sweep_batch_size' => 5);
make_expired($one, 500);
wait_until(
	sub { $admin->value(q{SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE backend_type = 'idempotency sweeper' AND datname = 'one' AND query ~ ': [1-9][0-9]* of about'}) eq '1' },
	'a sweeper that has deleted something');
set($admin, 'idempotency.sweep_pause' => undef, 'idempotency.sweep_batch_size' => undef);
swept($one, 'what a terminated sweeper has left');
wait_until(sub { processes('sweeper', $admin) eq '' }, 'the sweeper to be gone');
is($one->value('SELECT swept_rows FROM idempotency_stats'), '500', 'each row is counted');

# ProcSignalBarrier: the launcher answers it although it has nothing to do.
set($admin, 'idempotency.worker' => 'off');
$admin->value('SELECT pg_sleep(0.3)');
$admin->value('CREATE DATABASE barrier STRATEGY file_copy');
quick($admin, 'DROP DATABASE barrier');
pass('a launcher that idles answers a barrier');
set($admin, 'idempotency.worker' => 'on');

#
# By hand.
#
# Stopped while the postmaster is about to restart one, it stays so; the first
# time another one was started meanwhile.
sub end_launcher
{
	my $pid = processes('launcher', $admin);
	$admin->value("SELECT pg_terminate_backend($pid)");
	return wait_until(sub { processes('launcher', $admin) ne $pid }, 'the launcher to end');
}

foreach my $started ('t', 'f')
{
	end_launcher();
	$one->value('SELECT idem_start_worker()') if $started eq 't';
	is($one->value('SELECT idem_stop_worker()'), $started, 'stopped before the postmaster has restarted the launcher');
	$admin->value('SELECT pg_sleep(6)');
	is(processes('launcher', $admin), '', 'it is not restarted');
	isnt($one->value('SELECT idem_start_worker()'), '', 'it is started by hand');
}
$launcher = processes('launcher', $admin);
is($one->value('SELECT idem_start_worker()'), $launcher, 'there is one already');
is($one->value('SELECT idem_stop_worker()'), 't', 'it is stopped');
is(processes('launcher', $admin), '', 'at once');
is($one->value('SELECT idem_stop_worker()'), 'f', 'there is none any more');
make_expired($one, 3);
$admin->value('SELECT pg_sleep(6)');
is(expired($one), '3', 'it stays stopped');
my @starters = map { session($node, dbname => 'one') } 1 .. 4;
$_->send('SELECT idem_start_worker()') foreach @starters;
my %pids = map { $_->fetch => 1 } @starters;
is(scalar keys %pids, 1, 'started four times at once: there is one');
wait_until(sub { processes('launcher', $admin) eq join(',', keys %pids) }, 'the others to leave');
swept($one, 'started by hand');
is($one->value('SELECT idem_stop_worker()'), 't', 'and stopped by hand');
$one->value('SELECT idem_start_worker()');

#
# kill -9
#
foreach my $kind ('launcher', 'sweeper')
{
	my $crashing = log_size($node);
	set($admin, 'idempotency.sweep_pause' => '50 ms', 'idempotency.sweep_batch_size' => 5);
	make_expired($one, 2000);
	sweeping($admin, 'one');
	my $pid;
	wait_until(sub { ($pid = processes($kind, $admin)) ne '' }, "a $kind to kill");
	kill 'KILL', $pid;
	wait_until(sub { log_count($node, 'all server processes terminated; reinitializing', $crashing) > 0 }, 'the crash');
	$admin = session_again($node);
	($one, $two) = map { session($node, dbname => $_) } qw(one two);
	$two->value('SET search_path = s');
	set($admin, 'idempotency.sweep_pause' => undef, 'idempotency.sweep_batch_size' => undef);
	swept($one, "after kill -9 of a $kind");
}

#
# Few slots, of which the server's own launcher takes one.
#
$_->close foreach $admin, $one, $two;
$node->append_conf('postgresql.conf', 'max_worker_processes = 2');
$offset = log_size($node);
$node->restart;
($admin, $one) = map { session($node, dbname => $_) } qw(postgres one);
wait_until(sub { log_count($node, 'WARNING:  could not start an idempotency sweeper', $offset) > 0 }, 'the warning');
$admin->value('SELECT pg_sleep(4)');
is(log_count($node, 'WARNING:', $offset), 1, 'max_worker_processes is used up: one warning');
$node->append_conf('postgresql.conf', "max_worker_processes = 3");
$_->close foreach $admin, $one;
$node->restart;
($admin, $one) = map { session($node, dbname => $_) } qw(postgres one);
make_expired($one, 3);
swept($one, 'with a slot for the launcher and one for a sweeper');
$_->close foreach $admin, $one;
no_faults($node);
$node->stop;

done_testing();
