# What the worker tells the log of a database in trouble, and when.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use IdemTest::Worker;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $conf = <<'CONF';
idempotency.worker = on
idempotency.naptime = 1
max_connections = 30
CONF

sub says
{
	my ($node, $pattern, $what) = @_;
	wait_until(sub { log_count($node, $pattern) > 0 }, $what);
	return pass($what);
}

sub hold
{
	my ($session, $key) = @_;
	$session->value("SELECT idem_claim('$key', lease => '1 ms', takeover => false)");
	return;
}

sub stat_of { return $_[0]->value("SELECT $_[1] FROM idempotency_stats"); }

my $node = new_node('watched', extension => 0, conf => $conf);
my $admin = session($node);
$admin->value("CREATE DATABASE $_") foreach qw(one two three);
my ($one, $two, $three) = map { session($node, dbname => $_) } qw(one two three);
$_->value('CREATE EXTENSION idempotency') foreach $one, $two, $three;

#
# Rows that can't be deleted, at the front of a sweep that takes several visits:
# the item stays bad through all of them.
#
$one->value(q{CREATE TABLE refers (scope text DEFAULT '', key text, FOREIGN KEY (scope, key) REFERENCES idempotency_keys)});
$one->value(q{CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.002); RETURN NULL; END'});
$one->value(q{BEGIN; SELECT idem_once('kept', ttl => '1 ms'); INSERT INTO refers (key) VALUES ('kept');
	CREATE TRIGGER dawdle AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION dawdle(); COMMIT});
says($node, 'database "one" need attention: the last sweep failed', 'rows that can\'t be deleted');
make_expired($one, 1500);
my $runs = stat_of($one, 'sweep_runs');
wait_until(sub { $one->value('SELECT count(*) FROM idempotency_keys') eq '1' }, 'the sweep to do the others');
cmp_ok(stat_of($one, 'sweep_runs'), '>', $runs + 1, 'which takes several visits');
is($one->value(q{SELECT level FROM idem_health() WHERE item = 'sweep_failing'}), 'warning', 'are still the failure of the last sweep');
is(log_count($node, 'item "sweep_failing" of idem_health\(\) in database "one" is well again'), 0, 'of which nobody says that all is well');
$one->value('DROP TRIGGER dawdle ON idempotency_keys; TRUNCATE refers');
says($node, 'item "sweep_failing" of idem_health\(\) in database "one" is well again', 'until they are deleted');

#
# A sweep that fails is tried less and less; health is looked at as often.
#
$two->value('ALTER DATABASE two SET idempotency.health_stuck_after = 0; ALTER DATABASE two SET idempotency.health_stuck_claims = 0');
$two->value('DROP INDEX idempotency_keys_due_at_idx');
make_expired($two, 1);
says($node, 'could not sweep expired idempotency keys in database "two"', 'a sweep that fails');
wait_until(sub { stat_of($two, 'sweep_errors') >= 4 }, 'some more to fail');
my $errors = stat_of($two, 'sweep_errors');
$two->value(q{SELECT idem_claim('forgotten', lease => '1 ms')});
says($node, 'database "two" need attention: open claims', 'where sweeps fail, the other items are looked at');
cmp_ok(stat_of($two, 'sweep_errors'), '<=', $errors + 1, 'without another try for each look');
$two->value('DROP EXTENSION idempotency');
sleep(1.5);
is(log_count($node, 'database "two" are swept again'), 0, 'nobody says that a database without the extension is swept');

#
# A catalog that somebody has locked keeps a sweeper out, and not the others from
# being swept.
#
$one->value('BEGIN; REINDEX INDEX pg_class_oid_index');
$runs = stat_of($three, 'sweep_runs');
foreach my $round (1 .. 3)
{
	make_expired($three, 1);
	swept($three, "another database while a catalog is locked: round $round");
}
cmp_ok(stat_of($three, 'sweep_runs'), '>', $runs, 'by the worker');
$one->value('COMMIT');
make_expired($one, 1);
swept($one, 'the database when it no longer is');

#
# The worker is stopped while a sweeper starts, which is nobody's fault.
#
my $postmaster = freeze_launcher($node, $admin);
$one->send('SELECT idem_stop_worker()');
sleep(0.5);
kill 'CONT', $postmaster;
is($one->fetch, 't', 'the worker is stopped while a sweeper starts');
is(log_count($node, 'canceling statement due to lock timeout|ended before it had a result'), 0, 'no error of it in the log');
$_->close foreach $admin, $one, $two, $three;
no_faults($node);
$node->stop;

#
# Without preload the launcher remembers what was bad.
#
my $plain = new_node('plain', conf => $conf . "shared_preload_libraries = ''\n");
$admin = session($plain);
$admin->value('SELECT idem_start_worker()');
hold($admin, 'held');
says($plain, 'WARNING:  idempotency keys in database "postgres" need attention: keys held', 'without preload: what turns bad');
$admin->value(q{SELECT idem_resolve('held', 'failed')});
says($plain, 'LOG:  item "held_unknown" of idem_health\(\) in database "postgres" is well again', 'without preload: what is well again');
is(log_count($plain, 'need attention: keys held'), 1, 'without preload: one line each');
$admin->value('SELECT idem_stop_worker()');
$admin->close;
no_faults($plain);
$plain->stop;

done_testing();
