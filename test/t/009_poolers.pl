# A transaction pooler: each transaction of a client may run on another server
# connection, so nothing may depend on the session.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use IPC::Run qw(start);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($pgbouncer) = grep { -x } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin', '/usr/local/sbin';
plan skip_all => 'pgbouncer is not installed' unless $pgbouncer;

my $node = new_node('pooled');
my $folder = PostgreSQL::Test::Utils::tempdir_short();
my $port = PostgreSQL::Test::Cluster::get_free_port();
my $user = getpwuid($<);
append_to_file("$folder/users", qq{"$user" ""\n});
append_to_file("$folder/pgbouncer.ini", <<INI);
[databases]
postgres = host=${\ $node->host} port=${\ $node->port} dbname=postgres
[pgbouncer]
listen_addr =
listen_port = $port
unix_socket_dir = $folder
auth_type = trust
auth_file = $folder/users
pool_mode = transaction
default_pool_size = 4
server_reset_query = DISCARD ALL
server_reset_query_always = 1
INI
my ($out, $err) = ('', '');
my $pooler;
END
{
	local $?;
	$pooler->kill_kill if $pooler;
}
$pooler = start [ $pgbouncer, "$folder/pgbouncer.ini" ], '<', '/dev/null', '>', \$out, '2>', \$err;

# The socket is there a moment before anybody listens on it.
my $client;
wait_until(
	sub {
		$pooler->pump_nb;
		BAIL_OUT("pgbouncer ended: $err") unless $pooler->pumpable;
		return $client = eval { client() };
	},
	'pgbouncer to listen');

sub client { return IdemTest::Session->new(host => $folder, port => $port); }

my ($other, $rival) = map { client() } 1 .. 2;
my $admin = session($node);
my $last_pid = 0;
my %used;

# elsewhere CALL: its value, on another server connection than the call before.
# Two transactions have two connections, so one of them will do.
sub elsewhere
{
	my ($call) = @_;
	my %pid = map { $_ => $_->value('BEGIN; SELECT pg_backend_pid()') } $client, $other;
	my ($caller) = grep { $pid{$_} != $last_pid } $client, $other;
	my $value = $caller->value("SELECT $call");
	$_->value('COMMIT') foreach $client, $other;
	$last_pid = $pid{$caller};
	$used{$last_pid}++;
	return $value;
}

#
# A lease, one call a transaction.
#
my $token = elsewhere(q{(idem_claim('lease', '{"n": 1}', lease => '1 h')).token});
like($token, qr/^\d+$/, 'a claim');
is(elsewhere(q{(idem_claim('lease', '{"n": 1}')).outcome}), 'processing', 'a duplicate on another connection');
is(elsewhere(qq{idem_renew('lease', $token, '2 h') > now() + interval '1 h'}), 't', 'a renewal on another one');
is(elsewhere(qq{idem_checkpoint('lease', $token, 'halfway') IS NOT NULL}), 't', 'a checkpoint on another one');
is(elsewhere(qq{idem_complete('lease', '"done"', $token)}), 't', 'the completion on another one');
is(elsewhere(qq{idem_complete('lease', '"done"', $token)}), 'f', 'again, on another one');
is(elsewhere(q{(idem_claim('lease', '{"n": 1}')).response}), '"done"', 'the replay on another one');
cmp_ok(scalar keys %used, '>=', 2, 'at least two server connections were used');
is($rival->value(q{SELECT outcome, response FROM idem_claim('lease', '{"n": 1}')}), 'completed|"done"',
	'another client gets it, too');

$token = elsewhere(q{(idem_claim('failed')).token});
is(elsewhere(qq{idem_fail('failed', '1', $token, disposition => 'retry')}), 't', 'a failure');
is(elsewhere(q{(idem_claim('failed')).attempt}), '2', 'and the retry');

# A claim's token belongs to the claim, not to the connection it was made on.
my $stale = elsewhere(q{(idem_claim('stale', lease => '1 ms')).token});
my $fresh = elsewhere(q{(idem_claim('stale', lease => '1 h', wait => '1 min')).token});
is_sqlstate($client, "SELECT idem_complete('stale', '1', $stale)", 'IK410', 'a stale token on whatever connection');
is_sqlstate($client, "SELECT idem_complete('stale', '1')", 'IK410', 'and none at all');
is(elsewhere(qq{idem_complete('stale', '2', $fresh)}), 't', 'the current one holds');

#
# One transaction, between those of others.
#
$client->value(q{BEGIN; SELECT idem_claim('transaction', '{"n": 1}')});
is($rival->value(q{SELECT outcome FROM idem_claim('transaction', '{"n": 1}')}), 'processing', 'a rival of an open transaction');
$client->value(q{SELECT idem_complete('transaction', '1'); COMMIT});
is($rival->value(q{SELECT outcome FROM idem_claim('transaction', '{"n": 1}')}), 'completed', 'gets its result');

# A client that goes away in its transaction.
my $leaver = client();
$leaver->value(q{BEGIN; SELECT idem_claim('left', lease => '1 h')});
$rival->send(q{SELECT outcome, attempt FROM idem_claim('left', wait => '10 min')});
wait_until(
	sub {
		$admin->value(q{SELECT count(*) FROM pg_stat_activity
						WHERE wait_event_type = 'Extension' AND query LIKE '%left%'}) eq '1';
	},
	'the rival to wait');
$leaver->close;
is($rival->fetch, 'claimed|1', 'a client that goes away in its transaction frees the key');

#
# Waiting: the completion comes through the same pool.
#
$token = elsewhere(q{(idem_claim('waited', lease => '1 h')).token});
$rival->send(q{SELECT outcome, response FROM idem_claim('waited', wait => '10 min')});
wait_until(
	sub {
		$admin->value(q{SELECT count(*) FROM pg_stat_activity
						WHERE wait_event_type = 'Extension' AND query LIKE '%waited%'}) eq '1';
	},
	'the rival to wait');
is($client->value(qq{SELECT idem_complete('waited', '3', $token)}), 't', 'a completion while another client waits');
is($rival->fetch, 'completed|3', 'which gets the result');

#
# Nothing stays behind on the connections for whoever has them next.
#
is($admin->value(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database <> 0}), '0', 'no lock is left');
is(elsewhere(q{current_setting('search_path') || current_setting('synchronous_commit')
			   || (SELECT count(*) FROM pg_prepared_statements) || (SELECT count(*) FROM pg_cursors)}),
	$admin->value(q{SELECT current_setting('search_path') || current_setting('synchronous_commit') || '00'}),
	'nor a setting, a prepared statement or a cursor');

$_->close foreach $client, $other, $rival;
$pooler->kill_kill;
undef $pooler;
no_faults($node);
$node->stop;
done_testing();
