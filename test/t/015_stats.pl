# Counters and health where one session can't show it: several sessions and
# databases, crashes, standbys, prepared transactions, servers without preload,
# and the lines in the log.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('stats', conf => "restart_after_crash = on\nmax_connections = 50\n", init => { allows_streaming => 1 });

# counters SESSION: the view's row, as a hash
sub counters
{
	my ($session) = @_;
	my $result = $session->query('SELECT key, value FROM idempotency_stats s, jsonb_each_text(to_jsonb(s))');
	return { map { $_->[0] => $_->[1] } @{ $result->{rows} } };
}

# is_counted SESSION, EXPECTED, NAME: just these counters aren't zero
sub is_counted
{
	my ($session, $expected, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $counters = counters($session);
	my %counted = map { $_ => $counters->{$_} }
	  grep { !/^last_sweep|^stats_reset/ && $counters->{$_} ne '0' } keys %$counters;
	is_deeply(\%counted, $expected, $name);
	return;
}

sub reset_counters
{
	my ($session) = @_;
	$session->query('SELECT idem_stats_reset()');
	return;
}

sub level_of
{
	my ($session, $item) = @_;
	return $session->value("SELECT level FROM idem_health() WHERE item = '$item'");
}

my ($admin, @others) = map { session($node) } 1 .. 9;

# Many sessions at once: nothing is lost.
my @pending = map {
	my ($i, $session) = ($_, $others[$_]);
	$session->send(
		qq{DO \$\$ BEGIN
			FOR i IN 1..100 LOOP
				PERFORM idem_claim('s$i-' || i);
				COMMIT;
				PERFORM idem_once('o' || i);
				COMMIT;
			END LOOP;
		END \$\$});
	$session
} 0 .. 7;
$_->result foreach @pending;
is_counted($admin, { claims => 800, once_first => 100, once_again => 700 }, 'eight sessions count together');

# A wait that ends with the result is one replay, and no answer of processing.
reset_counters($admin);
my ($owner, $waiter) = @others;
my $token = $owner->value("SELECT token FROM idem_claim('w')");
$waiter->send("SELECT outcome FROM idem_claim('w', wait => '1 min')");
wait_for_sleep($admin, $waiter);
$owner->query("SELECT idem_complete('w', token => $token)");
$waiter->result;
is_counted($admin, { claims => 1, completions => 1, replays => 1 }, 'a wait is one answer, the one that it ends with');

# The loser of a claim counts, though its transaction is aborted.
reset_counters($admin);
$token = $owner->value("SELECT token FROM idem_claim('l', lease => '1 ms')");
wait_until(sub { $waiter->value("SELECT outcome FROM idem_claim('l', wait => '1 min')") eq 'claimed' }, 'the take-over');
$owner->query('BEGIN');
$owner->query("SELECT idem_once('undone')");
is_sqlstate($owner, "SELECT idem_complete('l', token => $token)", 'IK410', 'the claim is lost');
is(counters($admin)->{lost}, '1', 'a lost claim is counted at once');
$owner->query('ROLLBACK');
is_counted($admin, { claims => 2, takeovers => 1, lost => 1 }, 'and nothing else of its transaction');

# A backend that dies counts nothing of its transaction; here it ends by itself.
reset_counters($admin);
$owner->query('BEGIN');
$owner->query("SELECT idem_claim('terminated')");
my $pid = $owner->pid;
$admin->query("SELECT pg_terminate_backend($pid)");
wait_until(sub { $admin->value("SELECT count(*) FROM pg_stat_activity WHERE pid = $pid") eq '0' }, 'the backend to end');
is_counted($admin, {}, 'a terminated session counts nothing of its transaction');

# PREPARE TRANSACTION counts, and what becomes of it doesn't.
$admin->query('BEGIN');
$admin->query("SELECT idem_claim('prepared')");
$admin->query("PREPARE TRANSACTION 'one'");
is_counted($admin, { claims => 1 }, 'a prepared transaction is counted');
$admin->query("ROLLBACK PREPARED 'one'");
$admin->query('BEGIN');
$admin->query("SELECT idem_claim('prepared')");
$admin->query("PREPARE TRANSACTION 'two'");
$admin->query("COMMIT PREPARED 'two'");
is_counted($admin, { claims => 2 }, 'once, whatever becomes of it');

# Databases
reset_counters($admin);
$node->safe_psql('postgres', "CREATE DATABASE $_") foreach qw(one two);
$node->safe_psql($_, 'CREATE EXTENSION idempotency') foreach qw(one two);
my ($one, $two) = map { session($node, dbname => $_) } qw(one two);
$one->query("SELECT idem_claim('k')");
$two->query("SELECT idem_once('k')");
is_counted($one, { claims => 1 }, 'a database has counters of its own');
is_counted($two, { once_first => 1 }, 'so has another');
is_counted($admin, {}, 'and the third knows nothing of it');
reset_counters($one);
is_counted($two, { once_first => 1 }, 'a reset concerns one database only');
$one->close;
$node->safe_psql('postgres', 'DROP DATABASE one');
$node->safe_psql('postgres', 'CREATE DATABASE one');
$node->safe_psql('one', 'CREATE EXTENSION idempotency');
$one = session($node, dbname => 'one');
is_counted($one, {}, 'a database of the same name begins anew');
$two->query('DROP EXTENSION idempotency');
$two->query('CREATE EXTENSION idempotency');
is_counted($two, { once_first => 1 }, 'the counters are the database\'s: DROP EXTENSION leaves them');

# Health, by what was counted
$admin->query('CALL idem_sweep_all()');
reset_counters($admin);
is(level_of($admin, 'ttl_too_short'), 'ok', 'no key was reused after its expiry');
my $add_expired = q{INSERT INTO idempotency_keys
	(created_at, claimed_at, token, due_at, ttl, attempt, takeover, scope, key, operation, status, expires_at)
	SELECT t, t, 1, t, '10 min', 1, true, '', '%s' || i, '', 'completed', t
	FROM generate_series(1, %d) i, (SELECT clock_timestamp() - interval '5 min') v(t)};
$admin->query(sprintf($add_expired, 'reused', 10));
$admin->query("SELECT idem_once('reused' || i) FROM generate_series(1, 9) i");
is(level_of($admin, 'ttl_too_short'), 'ok', 'nine tell nothing yet');
$admin->query("SELECT outcome FROM idem_claim('reused10')");
is(level_of($admin, 'ttl_too_short'), 'warning', 'ten of ten are too many');
is($admin->value("SELECT value FROM idem_health() WHERE item = 'ttl_too_short'"), '100', 'all of them, in percent');
$admin->query("SELECT idem_once_many(array_agg('other' || i)) FROM generate_series(1, 1000) i");
is(level_of($admin, 'ttl_too_short'), 'ok', 'ten of 1,010 are not');
$admin->query("SET idempotency.health_ttl_too_short = 0.5");
is(level_of($admin, 'ttl_too_short'), 'warning', 'unless the threshold is lower');
$admin->query("SET idempotency.health_ttl_too_short = -1");
is(level_of($admin, 'ttl_too_short'), 'off', 'or it is off');
$admin->query("RESET idempotency.health_ttl_too_short");

$admin->query(q{CREATE TABLE refers (scope text DEFAULT '', key text, FOREIGN KEY (scope, key) REFERENCES idempotency_keys)});
$admin->query(sprintf($add_expired, 'kept', 2));
$admin->query("INSERT INTO refers (key) VALUES ('kept1'), ('kept2')");
is(level_of($admin, 'sweep_failing'), 'ok', 'no sweep has failed');
$admin->query('CALL idem_sweep_all()');
is($admin->value("SELECT level || ' ' || value || ' ' || (message ~ 'refers_scope_key_fkey') FROM idem_health() WHERE item = 'sweep_failing'"),
	'warning 2 true', 'a sweep that could not delete two rows has failed');
is(counters($admin)->{sweep_errors}, '2', 'and its errors are counted');

# The worker's lines: one when an item turns bad, one when it is well again.
$admin->query(q{CREATE FUNCTION pg_temp.report() RETURNS void AS '$libdir/idempotency', 'idem_health_report_now' LANGUAGE C});

# lines_of CODE: what it writes into the server's log about idem_health
sub lines_of
{
	my ($code) = @_;
	my $offset = -s $node->logfile;
	$code->();
	return grep { /(?:WARNING|LOG):.*(?:need attention|well again)/ }
	  split /\n/, substr(slurp_file($node->logfile), $offset);
}

$admin->query("SET client_min_messages = error");
my @lines = lines_of(sub { $admin->query('SELECT pg_temp.report()') });
is(scalar @lines, 1, 'an item that has turned bad is one line');
like($lines[0], qr/WARNING:  idempotency keys in database "postgres" need attention: the last sweep failed: .*refers_scope_key_fkey/, 'which says what and where');
is(scalar lines_of(sub { $admin->query('SELECT pg_temp.report()') foreach 1 .. 3 }), 0, 'and no more while it stays so');
is(scalar lines_of(sub { $others[2]->query(q{CREATE FUNCTION pg_temp.report() RETURNS void AS '$libdir/idempotency', 'idem_health_report_now' LANGUAGE C; SELECT pg_temp.report()}) }),
	0, 'from another session neither');
@lines = lines_of(sub { $one->query(q{CREATE FUNCTION pg_temp.report() RETURNS void AS '$libdir/idempotency', 'idem_health_report_now' LANGUAGE C; SELECT pg_temp.report()}) });
is(scalar @lines, 0, 'another database is well');
$admin->query("SELECT idem_claim('held', lease => '1 ms', takeover => false)");
wait_until(sub { level_of($admin, 'held_unknown') eq 'warning' }, 'the lease to end');
@lines = lines_of(sub { $admin->query('SELECT pg_temp.report()') });
is(scalar @lines, 1, 'another item has a line of its own');
like($lines[0], qr/keys held until idem_resolve\(\) settles them: 1/, 'that one');
$admin->query('SET idempotency.health_held_unknown = -1');
is(scalar lines_of(sub { $admin->query('SELECT pg_temp.report()') }), 0, 'one that is turned off is not called well');
$admin->query('RESET idempotency.health_held_unknown');
@lines = lines_of(sub { $admin->query('SELECT pg_temp.report()') });
is(scalar @lines, 1, 'turned on again, it is said once more');
like($lines[0], qr/WARNING:.*keys held until/, 'to be bad');
$admin->query("SELECT idem_resolve('held', 'failed')");
$admin->query('DROP TABLE refers');
$admin->query('CALL idem_sweep_all()');
@lines = sort { $a cmp $b } lines_of(sub { $admin->query('SELECT pg_temp.report()') });
is(scalar @lines, 2, 'both are well again, one line each');
like($_, qr/LOG:  item "(?:held_unknown|sweep_failing)" of idem_health\(\) in database "postgres" is well again: /, 'at level LOG') foreach @lines;
is(scalar lines_of(sub { $admin->query('SELECT pg_temp.report()') }), 0, 'and then nothing');
# somebody else has the table
$others[3]->query('BEGIN');
$others[3]->query('LOCK TABLE idempotency_keys');
$admin->query("SET statement_timeout = '10 s'");
is($admin->query('SELECT pg_temp.report()')->{error}, undef, 'a report does not wait for the table');
$admin->query('RESET statement_timeout');
$others[3]->query('ROLLBACK');

# A backlog too large for the window
SKIP:
{
	skip 'no setting idempotency.sweep_window', 7
	  if $admin->value("SELECT count(*) FROM pg_settings WHERE name = 'idempotency.sweep_window'") eq '0';
	my $window = session($node, dbname => 'one');
	my $set = $window->query("SET idempotency.sweep_window = '01:00-01:01'");
	if ($set->{error})
	{
		$node->safe_psql('postgres', "ALTER SYSTEM SET idempotency.sweep_window = '01:00-01:01'");
		$node->safe_psql('postgres', 'SELECT pg_reload_conf()');
		wait_until(sub { $window->value('SHOW idempotency.sweep_window') eq '01:00-01:01' }, 'the setting');
	}
	is(level_of($window, 'window'), 'ok', 'nothing to sweep fits into any window');
	$window->query(sprintf($add_expired, 'w', 400));
	is(level_of($window, 'window'), 'unknown', 'without a sweep nobody knows how long it takes');
	$window->query("CALL idem_sweep_all(batch_size => 1, max_batches => 3, pause => '400 ms')");
	is($window->value("SELECT threshold FROM idem_health() WHERE item = 'window'"), '60', 'the window is a minute long');
	is(level_of($window, 'sweep_overdue'), 'ok', 'nobody is late outside of the window');
	is(level_of($window, 'window'), 'warning', 'a backlog that takes longer is too large');
	my $overdue = q{SELECT threshold FROM idem_health() WHERE item = 'sweep_overdue'};
	is($window->value($overdue), '93600', 'a day more, if there is a window');
	$node->safe_psql('postgres', "ALTER SYSTEM SET idempotency.sweep_window = '00:00-24:00'");
	$node->safe_psql('postgres', 'SELECT pg_reload_conf()');
	wait_until(sub { $window->value('SHOW idempotency.sweep_window') eq '00:00-24:00' }, 'the setting');
	is($window->value($overdue), '7200', 'but not if it is open all day');
	$node->safe_psql('postgres', 'ALTER SYSTEM RESET idempotency.sweep_window');
	$node->safe_psql('postgres', 'SELECT pg_reload_conf()');
	$window->close;
}

# A standby counts what it answers, by itself.
reset_counters($admin);
my $standby = PostgreSQL::Test::Cluster->new('stats_standby');
$node->backup('backup');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
$admin->query("SELECT idem_complete(k, token => token) FROM (SELECT 'replicated' AS k, token FROM idem_claim('replicated')) c");
my $reader = session($standby);
my $lsn = $admin->value('SELECT pg_current_wal_flush_lsn()');
wait_until(sub { $reader->value("SELECT pg_last_wal_replay_lsn() >= '$lsn'") eq 't' }, 'the standby to catch up');
is($reader->value("SELECT outcome FROM idem_claim('replicated')"), 'completed', 'a standby replays');
is_counted($reader, { replays => 1 }, 'and counts it');
is_counted($admin, { claims => 1, completions => 1 }, 'which the primary does not');
is($reader->value("SELECT completed > 0 FROM idempotency_summary"), 't', 'it knows what is in the table');
is($reader->value("SELECT count(*) FROM idem_health() WHERE level = 'ok'"), '9', 'and is well');
$reader->close;
$standby->stop;

# A crash: the counters begin anew.
my $before = counters($admin)->{stats_reset};
my $victim = session($node);
kill 'KILL', $victim->pid;
$_->result foreach $victim, $admin;
$admin = session_again($node);
is_counted($admin, {}, 'after a crash the counters begin anew');
cmp_ok(counters($admin)->{stats_reset}, 'gt', $before, 'and stats_reset says since when');
$admin->query("SELECT idem_claim('after the crash')");
is_counted($admin, { claims => 1 }, 'and count');

# A restart too
$node->restart;
$admin = session($node);
is_counted($admin, {}, 'so they do after a restart');
$admin->close;

# Counters apart for two databases: those without room share theirs.
$node->append_conf('postgresql.conf', "idempotency.stats_databases = 2\n");
$node->restart;
$node->safe_psql('postgres', 'CREATE DATABASE three');
$node->safe_psql('three', 'CREATE EXTENSION idempotency');
my $three;
($admin, $one, $two, $three) = map { session($node, dbname => $_) } qw(postgres one two three);
$_->query("SELECT idem_once('room')") foreach $admin, $one;
$two->query("SELECT idem_claim('room')");
is_counted($admin, { once_first => 1 }, 'the first database that counts has counters of its own');
is_counted($one, { once_first => 1 }, 'so has the second');
is_counted($three, { claims => 1 }, 'the third and the fourth share theirs');
$two->query("SELECT idem_claim('held', lease => '1 ms', takeover => false)");
wait_until(sub { level_of($two, 'held_unknown') eq 'warning' }, 'the lease to end');
$two->query(q{CREATE FUNCTION pg_temp.report() RETURNS void AS '$libdir/idempotency', 'idem_health_report_now' LANGUAGE C});
is(scalar lines_of(sub { $two->query('SELECT pg_temp.report()') }), 1, 'what turns bad there is reported');
is(scalar lines_of(sub { $two->query('SELECT pg_temp.report()') }), 0, 'once, by who has reported it');
reset_counters($three);
is_counted($two, {}, 'a reset is for both');
$one->close;
$node->safe_psql('postgres', 'DROP DATABASE one');
$three->close;
$three = session($node, dbname => 'three');
$three->query("SELECT idem_once('room')");
is_counted($three, { once_first => 1 }, 'a dropped database makes room for the next one that asks');
is_counted($two, {}, 'which then is apart');
my $four = session($node, dbname => 'two');
is_counted($four, {}, 'and no more than that');
$_->close foreach $admin, $two, $three, $four;

# Without preload: no counters, and everything else.
$node->append_conf('postgresql.conf', "shared_preload_libraries = ''\n");
$node->restart;
$admin = session($node);
like_hint(is_sqlstate($admin, 'SELECT * FROM idempotency_stats', '55000', 'without preload there are no counters'),
	qr/shared_preload_libraries/, 'and a hint says what to do');
like_hint(is_sqlstate($admin, 'SELECT idem_stats_reset()', '55000', 'nor can they be reset'),
	qr/shared_preload_libraries/, 'with the same hint');
$token = $admin->value("SELECT token FROM idem_claim('without')");
is($admin->value("SELECT idem_complete('without', token => $token)"), 't', 'the calls work');
is_sqlstate($admin, "SELECT idem_complete('without', token => 1)", 'IK410', 'a lost claim is an error');
is($admin->value('SELECT idem_sweep() >= 0'), 't', 'so do sweeps');
$admin->query('CALL idem_sweep_all()');
is($admin->value('SELECT completed > 0 FROM idempotency_summary'), 't', 'and the summary');
is( $admin->value("SELECT string_agg(item, ',' ORDER BY item) FROM idem_health() WHERE level = 'unknown' AND value IS NULL AND message ~ 'shared_preload_libraries'"),
	'sweep_failing,ttl_too_short', 'the items of idem_health that need counters say so');
is($admin->value("SELECT count(*) FROM idem_health() WHERE level = 'ok'"), '7', 'the others work');
$admin->query(q{CREATE FUNCTION pg_temp.report() RETURNS void AS '$libdir/idempotency', 'idem_health_report_now' LANGUAGE C});
is($admin->query('SELECT pg_temp.report()')->{error}, undef, 'a report does without them');
$admin->close;

no_faults($node);
no_faults($standby);
done_testing();
