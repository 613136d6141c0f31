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
# A database that no process can connect to.
#
my $broken = session($node, dbname => 'broken');
$broken->value('CREATE EXTENSION idempotency');
make_expired($broken, 1);
swept($broken, 'a database that will break');
make_expired($broken, 5);
$broken->close;
$offset = log_size($node);
my $locale = $admin->value(q{SELECT quote_literal(datcollate) FROM pg_database WHERE datname = 'broken'});
$admin->value(q{UPDATE pg_database SET datcollate = 'xx_XX' WHERE datname = 'broken'});
wait_until(sub { log_count($node, 'FATAL: .*locale', $offset) > 0 }, 'the worker to be refused');
my $began = time();
sleep(9);
my $refused = log_count($node, 'FATAL: .*locale', $offset);
my $lasted = time() - $began;
cmp_ok($refused, '<', 3 + log($lasted) / log(2), sprintf "a database that can't be connected to is tried less and less (%d times in %.0f s)", $refused, $lasted);
is(log_count($node, 'WARNING:  could not sweep expired idempotency keys in database "broken"', $offset), 1, 'with one warning');
make_expired($other, 1);
swept($other, 'another database');
$admin->value("UPDATE pg_database SET datcollate = $locale WHERE datname = 'broken'");
$admin->value('SELECT pg_reload_conf()');
$broken = session($node, dbname => 'broken');
swept($broken, 'one that can be connected to again');
$broken->close;
$admin->value('DROP DATABASE broken');

#
# A sample of a large table: what is about at the threshold doesn't turn with each
# look; what is well is so for sure.
#
$large->value(q{ALTER TABLE idempotency_keys ALTER COLUMN response SET STORAGE PLAIN});
$large->value(q{SELECT idem_once('pattern', ttl => '1 d')});

$offset = log_size($node);
my $bad = 'WARNING:  idempotency keys in database "large" need attention: open claims';
my $well = 'LOG:  item "stuck_claims" of idem_health\(\) in database "large" is well again';
$large->value(q{ALTER DATABASE large SET idempotency.health_stuck_after = 1});
foreach my $part (0 .. 11)
{
	copies($large, "$part * 2000 + 1, $part * 2000 + 2000", response => q{to_jsonb(repeat('x', 3000))});
	$large->value(qq{SELECT count(idem_claim('stuck' || n, lease => '1 ms')) FROM generate_series($part * 3 + 1, $part * 3 + 3) n}) if $part % 2;
}
visits($large, 10);
is(log_count($node, $well, $offset), 0, 'a number near the threshold, in a sample: nobody says that it is well');

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
