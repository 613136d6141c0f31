# IdemTest.pm - what the TAP tests share: servers with the extension, sessions
# that don't block the test, crashes, and waiting for conditions.
#
# A test talks to its servers through sessions of its own (IdemTest::Session)
# rather than through psql: a race needs dozens of connections that are all
# busy at once, and a test of errors needs the SQLSTATE and nothing else.

package IdemTest;

use strict;
use warnings;

use Exporter 'import';
use FindBin;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

use IdemTest::Session;

our @EXPORT = qw(
  new_node session session_again make_clock crash freeze_writers wait_until wait_for_sleep
  is_sqlstate like_hint no_faults sql_quote patience
);

# How long a condition may take to come true before the test gives up.  Never
# how long something is expected to take.
sub patience { return $PostgreSQL::Test::Utils::timeout_default; }

# new_node NAME, OPTION => VALUE...: a server with the extension in database
# "postgres", started.
#   conf       further lines of postgresql.conf
#   init       arguments for Cluster's init()
#   start      0: leave it to the caller to start it and to create the extension
#   extension  0: don't create the extension
sub new_node
{
	my ($name, %option) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);
	$node->init(%{ $option{init} || {} });
	$node->append_conf('postgresql.conf', slurp_file("$FindBin::RealBin/../idempotency.conf"));
	$node->append_conf('postgresql.conf', $option{conf}) if $option{conf};
	return $node if exists $option{start} && !$option{start};
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION idempotency')
	  unless exists $option{extension} && !$option{extension};
	return $node;
}

# session NODE, OPTION => VALUE...: see IdemTest::Session.
sub session
{
	my ($node, %option) = @_;
	return IdemTest::Session->new(host => $node->host, port => $node->port, %option);
}

# make_clock: a library to be preloaded into a server whose clock a test sets
# (clock.c); nothing if there is no C compiler.
sub make_clock
{
	my $library = PostgreSQL::Test::Utils::tempdir() . '/clock.so';
	my $cc = `pg_config --cc`;
	chomp $cc;
	return system("$cc -shared -fPIC -o $library $FindBin::RealBin/lib/clock.c >/dev/null 2>&1") == 0 ? $library : undef;
}

sub sql_quote
{
	my ($text) = @_;
	return 'NULL' unless defined $text;
	$text =~ s/'/''/g;
	return "'$text'";
}

# wait_until CODE, WHAT: until CODE returns true.
sub wait_until
{
	my ($code, $what) = @_;
	my $deadline = time() + patience();
	while (!$code->())
	{
		BAIL_OUT("gave up waiting for: $what") if time() > $deadline;
		sleep(0.005);
	}
	return 1;
}

# wait_for_sleep ADMIN, SESSION: until SESSION's call sleeps in a wait for a key.
sub wait_for_sleep
{
	my ($admin, $waiter) = @_;
	my $pid = $waiter->pid;
	return wait_until(
		sub {
			$admin->value(
				"SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $pid") eq 't';
		},
		"backend $pid to wait for a key");
}

# session_again NODE: a session, as soon as a server that restarts itself is back.
sub session_again
{
	my ($node) = @_;
	my $session;
	wait_until(sub { $session = eval { session($node) }; defined $session }, 'the server to be back');
	return $session;
}

# A zombie is dead: it has closed its files and left the shared memory.
sub process_is_dead
{
	my ($pid) = @_;
	open(my $stat, '<', "/proc/$pid/stat") or return 1;
	my $line = <$stat>;
	close($stat);
	return !defined $line || $line =~ /\) [ZX] /;
}

sub children_of
{
	my ($parent) = @_;
	my @children;
	foreach my $file (glob '/proc/[0-9]*/stat')
	{
		open(my $stat, '<', $file) or next;
		my $line = <$stat>;
		close($stat);
		push @children, $1 if defined $line && $line =~ /^(\d+) \(.*\) \S+ (\d+) /s && $2 == $parent;
	}
	return @children;
}

# crash NODE: kill -9 the whole server at one instant, as a power cut would end
# it (but for the page cache).  What was in no file is lost: an immediate stop
# would let the processes run on for a moment.
sub crash
{
	my ($node) = @_;
	my ($postmaster) = slurp_file($node->data_dir . '/postmaster.pid') =~ /^(\d+)/;

	# A stopped postmaster starts nothing new while its children are killed.
	kill 'STOP', $postmaster;
	my @pids = (children_of($postmaster), $postmaster);
	kill 'KILL', @pids;
	$node->{_pid} = undef;
	wait_until(sub { !grep { !process_is_dead($_) } @pids }, 'the killed server to be dead');

	# We know that it is dead; its lock files name a process that exists until
	# init gets round to reaping it.
	unlink $node->data_dir . '/postmaster.pid',
	  $node->host . '/.s.PGSQL.' . $node->port . '.lock';
	return;
}

# freeze_writers ADMIN: stop the processes that write WAL or pages in the
# background, for good (crash() ends them all the same), so that what reaches
# the disk is what commits flush, and no more.
sub freeze_writers
{
	my ($admin) = @_;
	my @pids;
	wait_until(
		sub {
			@pids = split /\n/, $admin->value(
				q{SELECT pid FROM pg_stat_activity WHERE backend_type IN ('walwriter', 'background writer', 'checkpointer')});
			return @pids == 3;
		},
		'three background processes');
	kill 'STOP', @pids;
	foreach my $pid (@pids)
	{
		wait_until(sub { slurp_file("/proc/$pid/stat") =~ /\) T / }, "process $pid to stop");
	}
	return;
}

# is_sqlstate SESSION, SQL, SQLSTATE, NAME: the statement fails just so.
sub is_sqlstate
{
	my ($session, $sql, $sqlstate, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $result = $session->query($sql);
	my $error = $result->{error};
	is($error ? $error->{C} : 'no error', $sqlstate, $name)
	  or diag($error ? $error->{M} : 'returned ' . $session->text($result));
	return $result;
}

# like_hint RESULT, PATTERN, NAME: its error carries such a hint.
sub like_hint
{
	my ($result, $pattern, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	like($result->{error} && $result->{error}{H} || '', $pattern, $name);
	return;
}

# no_faults NODE: the server's log has nothing that no test may cause.
sub no_faults
{
	my ($node) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my @faults = grep {
		/PANIC:|TRAP:|terminated by signal (?!9\b)|reference leak|leaked|was not closed|(?<!is )still referenced|not own (?:a )?lock|problem in alloc set|invalid memory alloc|could not open relation with OID|cache lookup failed/
	} split /\n/, slurp_file($node->logfile);
	is(join("\n", @faults), '', 'the log of server ' . $node->name . ' is clean');
	return;
}

1;
