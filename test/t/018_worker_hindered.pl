# What stands in the worker's way for long: entries of deleted rows that nobody
# may remove, a row whose deletion takes for ever or ends processes, a database that can't be
# connected to; and what a sample of a large table says.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use IdemTest::Worker;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $node = new_node('hindered', extension => 0, conf => <<'CONF');
idempotency.worker = on
idempotency.naptime = 1
max_connections = 30
autovacuum = off
CONF
my $admin = session($node);
$admin->value("CREATE DATABASE $_") foreach qw(slow large broken other);
my ($slow, $large, $other) = map { session($node, dbname => $_) } qw(slow large other);
$_->value('CREATE EXTENSION idempotency') foreach $slow, $large, $other;

# copies SESSION, RANGE, COLUMN => VALUE...: many copies of key "pattern".
sub copies
{
	my ($session, $range, %other) = @_;
	my @columns = grep { $_ ne 'key' && !$other{$_} } split /\n/, $session->value(
		q{SELECT attname FROM pg_attribute WHERE attrelid = 'idempotency_keys'::regclass AND attnum > 0});
	return $session->value('INSERT INTO idempotency_keys ('
		. join(', ', 'key', @columns, keys %other) . ') SELECT '
		. join(', ', q{'k' || n}, @columns, values %other)
		. " FROM idempotency_keys, generate_series($range) n WHERE key = 'pattern'");
}

# visits SESSION, N: until the worker has visited the database that often.
sub visits
{
	my ($session, $n) = @_;
	my $runs = sub { $session->value('SELECT sweep_runs FROM idempotency_stats') };
	my $before = $runs->();
	return wait_until(sub { $runs->() >= $before + $n }, "$n visits");
}

#
# A row whose deletion takes for ever: the others are deleted, other databases
# are swept, and the database can be had.
#
$slow->value(q{CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN IF OLD.key = 'slow' THEN PERFORM pg_sleep(600); END IF; RETURN NULL; END$$});
$slow->value(q{BEGIN; CREATE TRIGGER dawdle AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION dawdle();
	SELECT idem_once('slow', ttl => '1 ms'); COMMIT});
make_expired($slow, 10);
wait_until(sub { $slow->value('SELECT count(*) FROM idempotency_keys') eq '1' }, 'the others to be swept');
pass('one row whose deletion takes for ever: the others are swept');
foreach my $round (1 .. 3)
{
	make_expired($other, 1);
	swept($other, "so is another database, round $round");
}
wait_until(sub { log_count($node, 'foreign keys and triggers took longer than a second') > 0 }, 'a word of it in the log');
is($slow->value(q{SELECT level FROM idem_health() WHERE item = 'sweep_failing'}), 'warning', 'and idem_health() tells of it');

#
# What can't be interrupted is waited for, and ends nothing: a long sum of products.
#
$slow->value('CREATE TABLE factor AS SELECT trunc(10::numeric ^ 65000 / 7) AS a');
my $measured = time();
$slow->value('SELECT sign(a*a) + sign(a*a) + sign(a*a) + sign(a*a) FROM factor');
my $terms = 1 + int(4 * 2.5 / (time() - $measured));
my $sum = join ' + ', ('sign(a*a)') x $terms;
$slow->value(qq{CREATE OR REPLACE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS \$\$
	DECLARE a numeric := (SELECT f.a FROM public.factor f);
	BEGIN
		IF OLD.key <> 'busy' THEN RETURN NULL; END IF;
		RETURN CASE WHEN $sum > 0 THEN OLD END;
	END\$\$});
$slow->value('TRUNCATE idempotency_keys');
wait_until(sub { log_count($node, 'expired idempotency keys in database "slow" are swept again') > 0 }, 'the slow row to be forgotten');
my $offset = log_size($node);
$slow->value('BEGIN');
make_expired($slow, 50);
$slow->value(q{SELECT idem_once('busy', ttl => '1 ms')});
make_expired($slow, 50);
$slow->value('COMMIT');
swept($slow, 'a row whose deletion takes long and hears of nothing, and the others');
is(complaints($node, $offset), '', 'without a word');

#
# Code that ends the process: by making an error of its own fatal, or because it
# catches each cancel.
#
$slow->value(q{CREATE OR REPLACE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF OLD.key = 'fatal3' AND current_setting('transaction_timeout', true) IS NOT NULL THEN
			PERFORM set_config('transaction_timeout', '1ms', false);
			PERFORM pg_sleep(600);
		ELSIF OLD.key LIKE 'fatal%' THEN
			PERFORM set_config('exit_on_error', 'on', false);
			RAISE EXCEPTION 'the end';
		END IF;
		WHILE OLD.key LIKE 'deaf%' LOOP
			BEGIN PERFORM pg_sleep(600); EXCEPTION WHEN query_canceled THEN NULL; END;
		END LOOP;
		RETURN NULL;
	END$$});
$offset = log_size($node);
my @deadly = qw(deaf1 deaf2 fatal1 fatal2 fatal3);
$slow->value('BEGIN');
foreach my $key (@deadly)
{
	make_expired($slow, 50);
	$slow->value("SELECT idem_once('$key', ttl => '1 ms')");
	make_expired($slow, 50);
}
$slow->value('COMMIT');
wait_until(sub { $slow->value('SELECT count(*) FROM idempotency_keys') eq scalar @deadly }, 'the others to be swept');
is($slow->value(q{SELECT string_agg(key, ' ' ORDER BY key) FROM idempotency_keys}), "@deadly",
	'rows whose deletion ends processes: all others are swept');
make_expired($other, 1);
swept($other, 'so is another database');
wait_until(sub { $slow->value(q{SELECT level FROM idem_health() WHERE item = 'sweep_failing'}) eq 'warning' }, 'idem_health() to tell of it');
make_expired($slow, 50);
wait_until(sub { $slow->value('SELECT count(*) FROM idempotency_keys') eq scalar @deadly }, 'later ones to be swept');
pass('later ones, too');
is(log_count($node, 'WARNING:  could not .* in database "slow"', $offset), 1, 'one word of it in the log');

#
# Rows that fail in a batch before one that ends the process are counted all the
# same.  And no code has parallel workers, for which a sweeper can't be the leader.
#
$admin->value('CREATE DATABASE lossy');
my $lossy = session($node, dbname => 'lossy');
$lossy->value(q{ALTER DATABASE lossy SET idempotency.sweep_batch_size = 10;
	CREATE EXTENSION idempotency;
	CREATE TABLE plans (line text) WITH (parallel_workers = 1);
	CREATE FUNCTION hinder() RETURNS trigger LANGUAGE plpgsql
		SET max_parallel_workers_per_gather = 2 SET max_parallel_maintenance_workers = 2 SET maintenance_work_mem = '256MB' SET parallel_setup_cost = 0 SET parallel_tuple_cost = 0 SET min_parallel_table_scan_size = 0 AS $$
	DECLARE line text;
	BEGIN
		IF OLD.key = 'explained' THEN
			FOR line IN EXPLAIN SELECT count(*) FROM pg_catalog.pg_proc WHERE prosrc <> '' LOOP INSERT INTO public.plans VALUES (line); END LOOP;
			CREATE INDEX of_lines ON public.plans (line);
			INSERT INTO public.plans VALUES ('workers: ' || current_setting('max_parallel_maintenance_workers'));
		ELSIF OLD.key = 'fatal' THEN
			PERFORM set_config('exit_on_error', 'on', false);
		END IF;
		IF OLD.key IN ('failing', 'fatal') THEN
			RAISE EXCEPTION 'lossy';
		END IF;
		RETURN NULL;
	END$$;
	CREATE TRIGGER hinder AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION hinder()});
$offset = log_size($node);
$lossy->value(q{BEGIN; SELECT idem_once('explained', ttl => '1 ms'), idem_once('failing', ttl => '1 ms')});
make_expired($lossy, 50);
$lossy->value(q{SELECT idem_once('fatal', ttl => '1 ms'); COMMIT});
my $lost = sub { log_count($node, 'FATAL:  lossy', $offset) };
wait_until(sub { $lost->() >= 4 }, 'four sweepers to be lost');
$admin->value('ALTER DATABASE lossy ALLOW_CONNECTIONS false');
visits($other, 3);
cmp_ok($lossy->value('SELECT sweep_errors FROM idempotency_stats'), '>=', 2 * ($lost->() - 1),
	'both rows are counted each time, though one of them ends the process');
is($lossy->value(q{SELECT count(*) > 0, count(*) FILTER (WHERE line LIKE '%Gather%'), max(line) FILTER (WHERE line LIKE 'workers%') FROM plans}),
	't|0|workers: 0', 'no plan is parallel, nor is the building of an index');
$lossy->close;
$admin->value('DROP DATABASE lossy');

my $slowest = 0;
$slow->close;
foreach my $name ('renamed', 'slow')
{
	my $before = $name eq 'slow' ? 'renamed' : 'slow';
	sweeping($admin, $before);
	my $began = time();
	$admin->value("ALTER DATABASE $before RENAME TO $name");
	$slowest = time() - $began if time() - $began > $slowest;
}
sweeping($admin, 'slow');
$admin->value('DROP DATABASE slow');
pass(sprintf 'the database can be renamed and dropped (%.1f s)', $slowest);

#
# A database that no process can connect to any more, while a sweep there is to go
# on behind a row that has ended a sweeper.
#
my $broken = session($node, dbname => 'broken');
$broken->value('CREATE EXTENSION idempotency');
make_expired($broken, 1);
swept($broken, 'a database that will break');
$broken->value(q{CREATE FUNCTION deaf() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		LOOP
			BEGIN PERFORM pg_sleep(600); EXCEPTION WHEN query_canceled THEN NULL; END;
		END LOOP;
	END$$});
$broken->value(q{BEGIN; CREATE TRIGGER deaf AFTER DELETE ON idempotency_keys FOR EACH ROW WHEN (OLD.key = 'deaf') EXECUTE FUNCTION deaf();
	SELECT idem_once('deaf', ttl => '1 ms')});
make_expired($broken, 5);
$broken->value('COMMIT');
$broken->close;
wait_until(
	sub { $admin->value(q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency sweeper' AND datname = 'broken' AND wait_event = 'PgSleep'}) eq '1' },
	'a sweeper to be at that row');
is($admin->value(q{SELECT wait_event FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'}),
	$admin->value('SHOW server_version_num') >= 170000 ? 'IdempotencySweeper' : 'Extension', 'the launcher waits for it, by name');
$offset = log_size($node);
my $locale = $admin->value(q{SELECT quote_literal(datcollate) FROM pg_database WHERE datname = 'broken'});
$admin->value(q{UPDATE pg_database SET datcollate = 'xx_XX' WHERE datname = 'broken'});
wait_until(sub { log_count($node, 'FATAL: .*locale', $offset) > 0 }, 'the worker to be refused');
my $began = time();
sleep(9);
my $refused = log_count($node, 'FATAL: .*locale', $offset);
my $lasted = time() - $began;
cmp_ok($refused, '<', 3 + log($lasted) / log(2), sprintf "a database that can't be connected to is tried less and less (%d times in %.0f s)", $refused, $lasted);
is(log_count($node, 'WARNING:  could not .* in database "broken"', $offset), 1, 'with one warning');
make_expired($other, 1);
swept($other, 'another database');
$admin->value("UPDATE pg_database SET datcollate = $locale WHERE datname = 'broken'");
$admin->value('SELECT pg_reload_conf()');
$broken = session($node, dbname => 'broken');
$broken->value('DROP FUNCTION deaf CASCADE');
swept($broken, 'one that can be connected to again');
$broken->close;
$admin->value('DROP DATABASE broken');

#
# A sample of a large table.  Claims that are left behind lie far from each other
# here, at irregular distances, so that chance picks them one by one.
#
$large->value(q{ALTER TABLE idempotency_keys ALTER COLUMN response SET STORAGE PLAIN});
$large->value(q{SELECT idem_once('pattern', ttl => '1 d')});

my $bad = 'WARNING:  idempotency keys in database "large" need attention: open claims';
my $well = 'LOG:  item "stuck_claims" of idem_health\(\) in database "large" is well again';
$large->value(q{ALTER DATABASE large SET idempotency.health_stuck_after = 1; ALTER DATABASE large SET idempotency.health_stuck_claims = 25});
my ($from, $distance) = (1, 1);
foreach my $part (0 .. 24)
{
	$distance = $distance * 75 % 1601;
	copies($large, "$from, $from + 199 + $distance", response => q{to_jsonb(repeat('x', 3000))});
	$from += 200 + $distance;
	$large->value(qq{SELECT idem_claim('stuck$part', lease => '1 ms')});
}
$large->value('SELECT pg_sleep(1.1)');
$large->value(q{CREATE FUNCTION report() RETURNS void AS '$libdir/idempotency', 'idem_health_report_now' LANGUAGE C;
	CREATE FUNCTION looks(n int) RETURNS TABLE (level text, value numeric, found int) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN 1 .. n LOOP
			RETURN QUERY SELECT h.level, h.value, substring(h.message from '\((\d+) in a sample of the table\)$')::int
						   FROM idem_health() h WHERE item = 'stuck_claims';
		END LOOP;
	END $$});
my $levels = q{SELECT bool_and(level = CASE WHEN found > %1$s THEN 'warning' WHEN value > %1$s THEN 'unknown' ELSE 'ok' END) FROM looks(100)};
foreach my $threshold (2, 10, 1000)
{
	$large->value("SET idempotency.health_stuck_claims = $threshold; SET idempotency.health_stuck_after = 1");
	is($large->value(sprintf $levels, $threshold), 't', "threshold $threshold: counted above it is a warning, estimated above it unknown");
}

cmp_ok($large->value('SELECT count(DISTINCT found) FROM looks(100)'), '>', 4, 'chance picks more or fewer of them');

# Many looks: those at the threshold never add up to a warning, those above it do.
$offset = log_size($node);
$large->value(q{SET idempotency.health_stuck_claims = 25; DO 'BEGIN FOR i IN 1 .. 300 LOOP PERFORM report(); END LOOP; END'});
visits($large, 5);
is(log_count($node, $bad, $offset), 0, 'at the threshold: no warning in 300 looks');
$large->value(q{ALTER DATABASE large SET idempotency.health_stuck_claims = 10});
wait_until(sub { log_count($node, $bad, $offset) > 0 }, 'more than twice the threshold to be noticed');
$large->value(q{ALTER DATABASE large SET idempotency.health_stuck_claims = 15});
visits($large, 10);
is(log_count($node, $bad, $offset) . log_count($node, $well, $offset), '10', 'near the threshold: nobody says that it is well');

# Far above it, then: nobody says so twice, and nobody says that it is well before
# it is.
$large->value(q{ALTER DATABASE large SET idempotency.health_stuck_claims = 500});
visits($large, 3);
$offset = log_size($node);
$large->value(q{SELECT count(idem_claim('more' || n, lease => '1 ms')) FROM generate_series(1, 3000) n});
wait_until(sub { log_count($node, $bad, $offset) > 0 }, 'many to be noticed');
visits($large, 5);
is(log_count($node, $bad, $offset) . log_count($node, $well, $offset), '10', 'many: one warning');
$large->value(q{SELECT count(idem_resolve(key, 'failed')) FROM idempotency_keys WHERE status = 'processing'});
wait_until(sub { log_count($node, $well, $offset) > 0 }, 'the line that tells that it is well');
is(log_count($node, $bad, $offset) . log_count($node, $well, $offset), '11', 'and one line when it is well');

$_->close foreach $admin, $large, $other;
no_faults($node);
$node->stop;
#
# A transaction that is open keeps vacuum from removing entries of deleted rows; to
# step over them takes longer than a visit, which lasts a second of a clock that
# runs fast here.
#
SKIP:
{
	my $clock = make_clock() or skip 'there is no C compiler to make the clock with', 1;
	my $dead = new_node('dead', start => 0, conf => "idempotency.naptime = 1\nautovacuum = off\n");
	{
		local $ENV{LD_PRELOAD} = $clock;
		local $ENV{IDEM_TEST_SPEED} = 40;
		$dead->start;
	}
	my ($session, $open) = map { session($dead) } 1 .. 2;
	$session->value('CREATE EXTENSION idempotency');
	$open->value('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idempotency_keys');
	$session->value(q{SELECT idem_once('pattern')});
	copies($session, '1, 500000', expires_at => q{timestamptz '2020-01-01'}, due_at => q{timestamptz '2020-01-01' + n / 100000 * interval '1 s'});
	$session->value('DELETE FROM idempotency_keys');
	make_expired($session, 1000);
	set($session, 'idempotency.worker' => 'on');
	swept($session, 'what lies behind many entries of deleted rows');
	$_->close foreach $open, $session;
	no_faults($dead);
	$dead->stop;
}
done_testing();
