# IdemTest/Worker.pm - what the tests of the background worker share: keys for
# it to sweep, waiting until it has, and reading what it tells the log.

package IdemTest::Worker;

use strict;
use warnings;

use Exporter 'import';
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

our @EXPORT = qw(set make_expired expired swept sweeping freeze_launcher log_size log_count complaints);

# set SESSION, NAME => VALUE...: changes settings of the server; undef resets one.
sub set
{
	my ($session, %setting) = @_;
	foreach my $name (sort keys %setting)
	{
		$session->value(defined $setting{$name}
			? "ALTER SYSTEM SET $name = " . sql_quote($setting{$name})
			: "ALTER SYSTEM RESET $name");
	}
	$session->value('SELECT pg_reload_conf()');
	return;
}

# make_expired SESSION, COUNT: so many keys, which have expired when it returns.
sub make_expired
{
	my ($session, $n) = @_;
	$session->value(
		"SELECT count(*) FROM idem_once_many(ARRAY(SELECT gen_random_uuid()::text FROM generate_series(1, $n)), ttl => '1 ms')");
	$session->value('SELECT pg_sleep(0.01)');
	return;
}

# expired SESSION: how many keys there are that have expired.
sub expired
{
	return $_[0]->value('SELECT count(*) FROM idempotency_keys WHERE expires_at <= clock_timestamp()');
}

# swept SESSION, WHAT: until there is none; a test that passes.
sub swept
{
	my ($session, $what) = @_;
	wait_until(sub { expired($session) eq '0' }, "$what to be swept");
	return pass("$what: swept");
}

# sweeping ADMIN, NAME: until there is a sweeper in the database of that name.
sub sweeping
{
	my ($admin, $name) = @_;
	return wait_until(
		sub {
			$admin->value(qq{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency sweeper' AND datname = '$name'})
			  eq '1';
		},
		"a sweeper in database $name");
}

# freeze_launcher NODE, ADMIN: stops the postmaster while the launcher waits for
# a sweeper that the postmaster has not started; returns the postmaster's pid,
# for it to be continued.
sub freeze_launcher
{
	my ($node, $admin) = @_;
	my ($postmaster) = slurp_file($node->data_dir . '/postmaster.pid') =~ /^(\d+)/;
	wait_until(
		sub {
			kill 'STOP', $postmaster;
			my $until = time() + 3;
			while (time() < $until)
			{
				return 1 if $admin->value(q{SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
					WHERE backend_type = 'idempotency launcher' AND classid = 'pg_database'::regclass
					AND mode = 'RowExclusiveLock'}) eq '1';
			}

			# It was stopped while it started one: not this time.
			kill 'CONT', $postmaster;
			$admin->value('SELECT pg_sleep(0.5)');
			return 0;
		},
		'the launcher to wait for a sweeper');
	return $postmaster;
}

# log_size NODE: an offset for the functions below.
sub log_size { return -s $_[0]->logfile; }

sub log_since
{
	my ($node, $offset) = @_;
	return substr(slurp_file($node->logfile), $offset || 0);
}

# log_count NODE, PATTERN, OFFSET: how often the log has it, from there on.
sub log_count
{
	my ($node, $pattern, $offset) = @_;
	my $count = () = log_since($node, $offset) =~ /$pattern/g;
	return $count;
}

# complaints NODE, OFFSET: what the log has had since that ought not to be there,
# the end of a session of our own by a fast shutdown aside.
sub complaints
{
	my ($node, $offset) = @_;
	return join "\n",
	  grep { /(?:WARNING|ERROR|FATAL|PANIC): / && !/terminating connection due to administrator command/ }
	  split /\n/, log_since($node, $offset);
}

1;
