# idem_schedule and idem_unschedule with the real pg_cron: the jobs they make
# run, and delete what has expired, in pg_cron's own database and in another
# one; whichever way pg_cron connects.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my ($share) = run_command([ 'pg_config', '--sharedir' ]);
plan skip_all => 'pg_cron is not installed' unless -e "$share/extension/pg_cron.control";

my $user = getpwuid($<);
my $odd_db = q{o'dd "db};
my $long_db = 'a database whose name has as many bytes as a name may have, 63';
my $odd_schema = q{"odd ""schema'; SELECT 1/0 --"};

# Settings of a server with pg_cron.  cron_host is where its own client
# connects, if it has one.
sub cron_conf
{
	my ($home) = @_;
	return "shared_preload_libraries = 'pg_cron,idempotency'\ncron.database_name = '$home'\n";
}

# Rows that have expired, and one that has not.
sub fill
{
	my ($session, $schema) = @_;
	$session->value(
		qq{SELECT count(*) FROM generate_series(1, 2500) n, $schema.idem_claim('old-' || n, ttl => '1 ms', lease => '1 ms')});
	$session->value(qq{SELECT outcome FROM $schema.idem_claim('live')});
	return;
}

sub keys_of
{
	my ($session, $schema) = @_;
	return $session->value(qq{SELECT string_agg(key, ',' ORDER BY key) FROM $schema.idempotency_keys});
}

#
# Two servers at once, since up to version 1.4 a job begins at a full minute
#
my %node;
my $began = time();
foreach my $way ('a connection', 'a background worker')
{
	my $name = $way =~ s/.* //r;
	my $node = $node{$way} = new_node($name, start => 0, conf => cron_conf('postgres'));
	$node->append_conf('postgresql.conf', $way eq 'a connection'
		? "cron.host = '" . $node->host . "'\n"
		: "cron.use_background_workers = on\n");
	$node->start;
	$node->safe_psql('postgres', qq{CREATE SCHEMA $odd_schema; CREATE EXTENSION pg_cron; CREATE EXTENSION idempotency SCHEMA $odd_schema});
	$node->safe_psql('postgres', q{CREATE DATABASE "} . ($odd_db =~ s/"/""/gr) . '"');
}
my $s = session($node{'a connection'});
$s->value(qq{SET search_path = $odd_schema, public});

# The shortest schedule there is.
my $version = $s->value(q{SELECT extversion FROM pg_extension WHERE extname = 'pg_cron'});
my $soon = $version =~ /^1\.[0-4](\D|$)/ ? '* * * * *' : '1 second';
note("pg_cron $version, schedule $soon");

my %session;
foreach my $way (sort keys %node)
{
	my $home = session($node{$way});
	my $there = session($node{$way}, dbname => $odd_db);
	$there->value(qq{CREATE SCHEMA $odd_schema});
	$there->value(qq{CREATE EXTENSION idempotency SCHEMA $odd_schema});
	fill($_, $odd_schema) foreach $home, $there;
	$home->value(qq{SET search_path = $odd_schema, public});
	like($home->value(q{SELECT idem_schedule()}), qr/^\d+$/, "$way: scheduling gives the job's id");
	is($home->value(qq{SELECT idem_schedule('$soon') = jobid FROM cron.job}), 't', 'and the same one at the second call');
	is($home->value(q{SELECT idem_schedule(database => current_database(), schedule => '} . $soon . q{') = jobid FROM cron.job}), 't',
		'or when it names its own database');
	$home->value(qq{SELECT idem_schedule('$soon', } . sql_quote($odd_db) . ')');
	is($home->value(q{SELECT count(*), count(DISTINCT database), min(schedule), max(schedule) FROM cron.job}),
		"2|2|$soon|$soon", 'one job a database');
	$session{$way} = [ $home, $there ];
}

#
# Meanwhile: names, errors, privileges
#
is($s->value('SELECT string_agg(jobname::text, E\'\n\' ORDER BY jobname::text COLLATE "C") FROM cron.job'),
	"idempotency sweep $odd_db\nidempotency sweep postgres", 'the jobs say what they do');
like_hint(is_sqlstate($s, q{SELECT idem_schedule('never')}, '22023', 'a bad schedule is pg_cron\'s error'),
	qr/cron format|five fields/, 'the hint says what one looks like, in its words or ours');
like_hint(is_sqlstate($s, q{SELECT idem_schedule(database => 'template0')}, '55000', 'a database that allows no connections'),
	qr/ALLOW_CONNECTIONS/, 'the hint says how it would');
is_sqlstate($s, q{SELECT idem_schedule(NULL)}, 'IK400', 'a null one is ours');
like_hint(is_sqlstate($s, q{SELECT idem_schedule(database => 'nowhere')}, '3D000', 'a database that does not exist'),
	qr/a database of this server/, 'with a hint');
is_sqlstate($s, q{BEGIN READ ONLY; SELECT idem_schedule()}, '25006', 'a read-only transaction');
$s->query('ROLLBACK');
is_sqlstate($s, q{BEGIN READ ONLY; SELECT idem_unschedule()}, '25006', 'also to unschedule');
$s->query('ROLLBACK');
is($s->value(q{SELECT count(*) FROM cron.job}), '2', 'none of them has changed a job');
is($s->value(q{SELECT idem_unschedule('nowhere')}), 'f', 'no job for a database that does not exist');

{
	my $other = session($node{'a connection'}, dbname => $odd_db);
	foreach my $call ('idem_schedule()', 'idem_unschedule()')
	{
		like_hint(is_sqlstate($other, qq{SELECT $odd_schema.$call}, '55000', "$call in another database than pg_cron's"),
			qr/Connect to that database/, 'says where');
	}
}

# Names that differ late are different jobs, and a job goes even if its database
# has gone before.
{
	my $longer = substr($long_db, 0, -1);
	$s->value(qq{CREATE DATABASE "$_"}) foreach $long_db, $longer;
	$s->value(qq{SELECT idem_schedule(database => '$_')}) foreach $long_db, $longer, $long_db;
	is($s->value(q{SELECT count(*), count(DISTINCT database), max(length(jobname::text)) <= 63 FROM cron.job WHERE database LIKE 'a database%'}),
		'2|2|t', 'long names of databases');
	$s->value(qq{DROP DATABASE "$longer"});
	is($s->value(qq{SELECT idem_unschedule('$longer')}), 't', 'the job of a dropped database is removed');
	is($s->value(q{SELECT database FROM cron.job WHERE database LIKE 'a database%'}), $long_db, 'and no other');
	is($s->value(qq{SELECT idem_unschedule('$long_db')}), 't', 'nor does the other one stay');
}

# What somebody has put in the way of the names.
{
	my $hostile = session($node{'a connection'});
	$hostile->value(q{CREATE SCHEMA hostile; SET search_path = hostile, pg_catalog});
	$hostile->value(q{CREATE FUNCTION hostile.cannot(name, text) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE ''hijacked''; END'});
	$hostile->value(q{CREATE FUNCTION hostile.cannot(text, name) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE ''hijacked''; END'});
	$hostile->value(q{CREATE OPERATOR hostile.= (FUNCTION = hostile.cannot, LEFTARG = name, RIGHTARG = text)});
	$hostile->value(q{CREATE OPERATOR hostile.= (FUNCTION = hostile.cannot, LEFTARG = text, RIGHTARG = name)});
	$hostile->value(q{CREATE TEMPORARY TABLE job (jobid bigint, jobname text, username text)});
	$hostile->value(qq{SELECT $odd_schema.idem_schedule('\@reboot', 'template1')});
	is($hostile->value(qq{SELECT $odd_schema.idem_unschedule('template1')}), 't', 'search_path does not matter');
	$hostile->value('DROP SCHEMA hostile CASCADE');
}

# As the caller: pg_cron's privileges are needed, and its jobs are the caller's.
{
	$s->value($_) foreach 'CREATE ROLE sweeper LOGIN', qq{GRANT USAGE ON SCHEMA $odd_schema TO sweeper};
	my $sweeper = session($node{'a connection'}, user => 'sweeper');
	$sweeper->value(qq{SET search_path = $odd_schema, public});
	is_sqlstate($sweeper, 'SELECT idem_schedule()', '42501', 'a role without the privilege');
	$s->value(q{SELECT idem_grant('sweeper')});
	is_sqlstate($sweeper, 'SELECT idem_schedule()', '42501', 'nor has an application');
	$s->value(q{SELECT idem_grant('sweeper', admin => true)});
	like_hint(is_sqlstate($sweeper, 'SELECT idem_schedule()', '42501', 'an administrator lacks pg_cron\'s'),
		qr/grant USAGE on schema "cron"/, 'the hint says which privilege');
	$s->value('GRANT USAGE ON SCHEMA cron TO sweeper');
	is($sweeper->value('SELECT idem_unschedule()'), 'f', 'others\' jobs are not his');
	like($sweeper->value(q{SELECT idem_schedule('0 0 1 1 *')}), qr/^\d+$/, 'with both he has a job');
	is($s->value(q{SELECT string_agg(username, ',' ORDER BY username COLLATE "C") FROM cron.job WHERE database = 'postgres'}),
		join(',', sort($user, 'sweeper')), 'of his own');
	is_sqlstate($sweeper, 'SELECT idem_schedule(database => ' . sql_quote($odd_db) . ')', '42501', 'but only in this database');
	is($sweeper->value('SELECT idem_unschedule()'), 't', 'and removes his own');
	is($s->value(q{SELECT count(*) FROM cron.job}), '2', 'only');
}

# pg_cron as it was before 1.4.
$s->value(q{BEGIN});
$s->value(q{ALTER EXTENSION pg_cron DROP FUNCTION cron.schedule_in_database});
like_hint(is_sqlstate($s, 'SELECT idem_schedule()', '55000', 'a pg_cron that is too old'), qr/1\.4/, 'says which one is not');
$s->query('ROLLBACK');

#
# Servers where it can't be done
#
{
	my $node = new_node('without', conf => "wal_level = replica\nmax_wal_senders = 2\n", init => { allows_streaming => 1 });
	my $w = session($node);
	foreach my $call ('idem_schedule()', 'idem_unschedule()')
	{
		like_hint(is_sqlstate($w, "SELECT $call", '55000', "$call without pg_cron"), qr/shared_preload_libraries/, 'says what to do');
	}
	$w->value(q{SET cron.database_name = 'postgres'});
	is_sqlstate($w, 'SELECT idem_schedule()', '55000', 'a setting that only pretends to be pg_cron\'s');

	$node->append_conf('postgresql.conf', cron_conf('elsewhere'));
	$node->restart;
	$w = session($node);
	my $result = is_sqlstate($w, 'SELECT idem_schedule()', '55000', 'pg_cron at home in a database that is not there');
	like($result->{error}{M}, qr/"elsewhere"/, 'is named');
	$node->append_conf('postgresql.conf', cron_conf('postgres'));
	$node->restart;
	$w = session($node);
	like_hint(is_sqlstate($w, 'SELECT idem_schedule()', '42704', 'pg_cron without its extension'), qr/CREATE EXTENSION pg_cron/, 'says what to do');
	$w->value('CREATE EXTENSION pg_cron');
	like($w->value('SELECT idem_schedule()'), qr/^\d+$/, 'and is all there is to do');

	$node->backup('base');
	my $standby = PostgreSQL::Test::Cluster->new('standby');
	$standby->init_from_backup($node, 'base', has_streaming => 1);
	$standby->start;
	my $r = session($standby);
	like_hint(is_sqlstate($r, "SELECT $_", '25006', "$_ on a standby"), qr/primary/, 'says where to') foreach 'idem_schedule()', 'idem_unschedule()';
	$r->close;
	$standby->stop;
	no_faults($standby);
	no_faults($node);
	$node->stop;
}

#
# The jobs have run, each in its own transactions
#
foreach my $way (sort keys %node)
{
	my ($home, $there) = @{ $session{$way} };
	foreach my $session ($home, $there)
	{
		my $where = $session == $home ? 'its own database' : 'another database';
		wait_until(sub { keys_of($session, $odd_schema) eq 'live' }, "pg_cron to sweep $where by $way");
		pass("by $way pg_cron has swept $where, and left what has not expired");
	}
	wait_until(
		sub {
			$home->value(q{SELECT count(DISTINCT database) FROM cron.job_run_details WHERE status = 'succeeded'}) eq '2';
		},
		'both runs to be recorded');
	is($home->value(q{SELECT string_agg(DISTINCT concat_ws(' ', database, status, return_message), E'\n' ORDER BY concat_ws(' ', database, status, return_message))
					  FROM cron.job_run_details WHERE status NOT IN ('starting', 'running', 'sending', 'connecting')})
		=~ s/ (CALL|1 row)$//mgr,
		"$odd_db succeeded\npostgres succeeded", 'and every run has succeeded');
	is($home->value('SELECT idem_unschedule()'), 't', "$way: unscheduling removes the job");
	is($home->value('SELECT idem_unschedule()'), 'f', 'once');
	is($home->value('SELECT idem_unschedule(' . sql_quote($odd_db) . ')'), 't', 'and that of the other database');
	is($home->value('SELECT count(*) FROM cron.job'), '0', 'so that none is left');
	no_faults($node{$way});
	$node{$way}->stop;
}
note(sprintf('%.0f s', time() - $began));
done_testing();
