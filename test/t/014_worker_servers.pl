# The background worker on servers of other kinds: many databases, a standby,
# one that does not preload the library, pg_upgrade's.

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

my $conf = <<'CONF';
idempotency.worker = on
idempotency.naptime = 1
max_connections = 30
restart_after_crash = on
CONF

sub launcher
{
	return $_[0]->value(q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'});
}

#
# A hundred databases of which two have the extension.  Who visits a database
# ends a transaction in it, at least the one that connects.
#
my $node = new_node('many', extension => 0, conf => $conf, init => { allows_streaming => 1 });
my $admin = session($node);
$admin->value("CREATE DATABASE d$_") foreach 1 .. 98;
my @have = map { session($node, dbname => "d$_") } 17, 71;
$_->value('CREATE EXTENSION idempotency') foreach @have;

sub visits
{
	return $admin->value(q{SELECT count(*) FILTER (WHERE xact_commit > 0), sum(xact_commit)
		FROM pg_stat_database WHERE datname ~ '^d\d+$' AND datname NOT IN ('d17', 'd71')});
}

wait_until(sub { visits() =~ /^96\|/ }, 'a visit to each database');
foreach my $session (@have) { make_expired($session, 10); swept($session, 'one of the two'); }
my $visits = visits();
foreach my $round (1 .. 3)
{
	my $begin = time();
	make_expired($_, 10) foreach @have;
	wait_until(sub { expired($_) eq '0' }, 'the two') foreach @have;
	pass(sprintf 'round %d: both are swept (%.1f s)', $round, time() - $begin);
}
is(visits(), $visits, 'the others are not visited');

# The extension comes with a template, and to databases that were visited already.
$_->close foreach @have;
wait_until(sub { $admin->value(q{SELECT count(*) FROM pg_stat_activity WHERE datname = 'd17'}) eq '0' }, 'd17 to be free');
$admin->value('CREATE DATABASE copy TEMPLATE d17');
foreach my $name ('copy', 'd5')
{
	my $s = session($node, dbname => $name);
	$s->value('CREATE EXTENSION IF NOT EXISTS idempotency');
	make_expired($s, 10);
	swept($s, "an extension that is new in database $name");
	$s->close;
}
my $s = session($node, dbname => 'd6');
$s->value('BEGIN; CREATE EXTENSION idempotency');
$admin->value('SELECT pg_sleep(1.2)');
$s->value('COMMIT');
make_expired($s, 10);
swept($s, 'a CREATE EXTENSION that took a while to commit');
$s->close;
is(complaints($node), '', 'nothing in the log');

#
# A standby, and its promotion.
#
my $backup = $node->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'base', has_streaming => 1);
$standby->start;
my $sb = session($standby, dbname => 'd6');
is(launcher($sb), '', 'nothing runs on a standby');
like_hint(is_sqlstate($sb, 'SELECT idem_start_worker()', '25006', 'nor can it be started'), qr/promoted/, 'with a hint');
is($sb->value('SELECT idem_stop_worker()'), 'f', 'there is nothing to stop');
$admin->value('ALTER SYSTEM SET idempotency.worker = off');
$node->reload;
$admin->value('SELECT pg_sleep(0.5)');
$s = session($node, dbname => 'd6');
make_expired($s, 10);
$s->close;
$standby->append_conf('postgresql.conf', 'idempotency.worker = on');
wait_until(sub { expired($sb) eq '10' }, 'the standby to have the keys');
is(launcher($sb), '', 'still nothing');
$standby->promote;
swept($sb, 'once it is promoted');
isnt(launcher($sb), '', 'the launcher runs');
$sb->close;
is(complaints($standby) =~ s/^.*(?:idem_start_worker|walreceiver).*\n?//mgr, '', 'nothing else in the log');
no_faults($standby);
$standby->stop;
$admin->close;
no_faults($node);
$node->stop;

#
# Without preload: by hand.
#
my $plain = new_node('plain', extension => 0, conf => "${conf}shared_preload_libraries = ''\n");
$admin = session($plain);
$admin->value('CREATE DATABASE other');
$admin->value('CREATE EXTENSION idempotency');
is(launcher($admin), '', 'no preload, no launcher');
make_expired($admin, 10);
my $pid = $admin->value('SELECT idem_start_worker()');
is(launcher($admin), $pid, 'started by hand');
is($admin->value('SELECT idem_start_worker()'), $pid, 'once');
swept($admin, 'without preload');
my $other = session($plain, dbname => 'other');
$other->value('CREATE EXTENSION idempotency');
make_expired($other, 10);
swept($other, 'an extension that is created later is found');
$admin->value('CREATE DATABASE fresh');
my $fresh = session($plain, dbname => 'fresh');
$fresh->value('CREATE EXTENSION idempotency');
make_expired($fresh, 10);
swept($fresh, 'and a new database');

kill 'KILL', $pid;
wait_until(sub { slurp_file($plain->logfile) =~ /all server processes terminated; reinitializing/ }, 'the crash');
$admin = session_again($plain);
make_expired($admin, 10);
swept($admin, 'after a crash it is there again');
is($admin->value('SELECT idem_stop_worker()'), 't', 'stopped by hand');
is(launcher($admin), '', 'and gone');

# Every slot is taken.
$plain->append_conf('postgresql.conf', 'max_worker_processes = 1');
$admin->close;
$plain->restart;
$admin = session($plain);
like_hint(is_sqlstate($admin, 'SELECT idem_start_worker()', '53400', 'no free slot'), qr/max_worker_processes/, 'with a hint');
$admin->close;
no_faults($plain);
$plain->stop;

#
# pg_upgrade's servers have no worker, preloaded or not.
#
my $upgrade = new_node('upgrade', extension => 0, conf => $conf, start => 0);
command_ok([ 'pg_ctl', '-w', '-D', $upgrade->data_dir, '-l', $upgrade->logfile, '-o', '-b', 'start' ], 'a server in binary upgrade mode');
my $name = $upgrade->connstr('postgres');
my ($out) = run_command([ 'psql', '-XAtq', '-d', $name, '-c',
	"SELECT count(*) FROM pg_stat_activity WHERE backend_type ~ '^idempotency'" ]);
is($out, '0', 'has no launcher');
command_ok([ 'pg_ctl', '-w', '-D', $upgrade->data_dir, '-m', 'fast', 'stop' ], 'and stops');

done_testing();
