# IdemTest/Session.pm - a database session that need not be waited for.
#
# Speaks just as much of PostgreSQL's protocol (version 3, simple queries, a
# Unix socket, no password) as the tests need:
#
#	my $s = session($node);
#	$s->send('SELECT ...');			# and do something else meanwhile
#	$s->is_done;					# has the answer come?
#	my $result = $s->result;		# wait for it
#
# A result is { rows => [[...]...], columns => [...], tag => '...', error => {...} }
# of the last statement; NULL is undef.  An error's fields are named as in the
# protocol: C = SQLSTATE, M = message, D = detail, H = hint.  If the connection
# was lost, the SQLSTATE is that of the last word of the server, or '08006'.

package IdemTest::Session;

use strict;
use warnings;

use IO::Select;
use IO::Socket::UNIX;
use PostgreSQL::Test::Utils;
use Time::HiRes qw(time);

# new OPTION => VALUE...
#   host, port   the socket's folder and number
#   dbname       default: postgres
#   user         default: the one of the operating system
#   encoding     client_encoding, default: UTF8
#   options      hash of further settings for the session
sub new
{
	my ($class, %option) = @_;
	my $self = bless { buffer => '', lost => 0 }, $class;
	my $path = "$option{host}/.s.PGSQL.$option{port}";

	$self->{socket} = IO::Socket::UNIX->new(Peer => $path)
	  or die "could not connect to $path: $!";
	my %setting = (
		user => $option{user} || scalar getpwuid($<),
		database => $option{dbname} || 'postgres',
		client_encoding => $option{encoding} || 'UTF8',
		%{ $option{options} || {} });
	my $body = pack('N', 3 << 16) . join('', map { "$_\0$setting{$_}\0" } sort keys %setting) . "\0";
	$self->_write(pack('N', length($body) + 4) . $body);
	my $result = $self->result;
	die "could not connect: $result->{error}{M}" if $result->{error};
	return $self;
}

sub pid { return $_[0]->{pid}; }

# send SQL: several may be sent before the first result is read.
sub send
{
	my ($self, $sql) = @_;
	utf8::encode($sql) if utf8::is_utf8($sql);
	my $body = "$sql\0";
	$self->_write('Q' . pack('N', length($body) + 4) . $body);
	return $self;
}

# is_done: would result() return at once?
sub is_done
{
	my ($self) = @_;
	$self->_receive(0);
	return $self->{lost} || $self->_has_ready;
}

# result: the answer to the earliest statement that was sent and not yet
# answered.
sub result
{
	my ($self) = @_;
	my $result = { rows => [], columns => [] };
	my $deadline = time() + $PostgreSQL::Test::Utils::timeout_default;
	for (;;)
	{
		my $message = $self->_next_message;
		if (!defined $message)
		{
			if ($self->{lost})
			{
				$result->{error} ||= { C => '08006', M => 'connection lost' };
				return $result;
			}
			die 'gave up waiting for the server' if time() > $deadline;
			$self->_receive(1);
			next;
		}
		return $result if $self->_take($result, @$message);
	}
}

sub query
{
	my ($self, $sql) = @_;
	return $self->send($sql)->result;
}

# text RESULT: as psql -At shows it.
sub text
{
	my ($self, $result) = @_;
	return join("\n", map { join('|', map { defined $_ ? $_ : '' } @$_) } @{ $result->{rows} });
}

# value SQL: the rows as text; an error ends the test.
sub value
{
	my ($self, $sql) = @_;
	my $result = $self->query($sql);
	die "$sql: $result->{error}{C} $result->{error}{M}" if $result->{error};
	return $self->text($result);
}

# fetch: as value, for what was sent before.
sub fetch
{
	my ($self) = @_;
	my $result = $self->result;
	die "$result->{error}{C} $result->{error}{M}" if $result->{error};
	return $self->text($result);
}

# row SQL: its one row as a hash.
sub row
{
	my ($self, $sql) = @_;
	my $result = $self->query($sql);
	die "$sql: $result->{error}{C} $result->{error}{M}" if $result->{error};
	return $self->hash($result);
}

# hash RESULT: its first row as a hash.
sub hash
{
	my ($self, $result) = @_;
	my %row;
	@row{ @{ $result->{columns} } } = @{ $result->{rows}[0] || [] };
	return \%row;
}

sub close
{
	my ($self) = @_;
	$self->_write('X' . pack('N', 4)) unless $self->{lost};
	CORE::close($self->{socket});
	$self->{lost} = 1;
	return;
}

sub _write
{
	my ($self, $bytes) = @_;
	local $SIG{PIPE} = 'IGNORE';
	while (length $bytes)
	{
		my $written = syswrite($self->{socket}, $bytes);
		return unless defined $written;		# the reader will notice
		substr($bytes, 0, $written) = '';
	}
	return;
}

sub _receive
{
	my ($self, $seconds) = @_;
	while (!$self->{lost} && IO::Select->new($self->{socket})->can_read($seconds))
	{
		my $got = sysread($self->{socket}, $self->{buffer}, 65536, length $self->{buffer});
		$self->{lost} = 1 unless $got;
		$seconds = 0;
	}
	return;
}

# The type and body of the next whole message.
sub _next_message
{
	my ($self) = @_;
	return if length($self->{buffer}) < 5;
	my ($type, $length) = unpack('a N', $self->{buffer});
	return if length($self->{buffer}) < $length + 1;
	my $body = substr($self->{buffer}, 5, $length - 4);
	substr($self->{buffer}, 0, $length + 1) = '';
	return [ $type, $body ];
}

# Is there a whole ReadyForQuery in the buffer?
sub _has_ready
{
	my ($self) = @_;
	my $at = 0;
	while (length($self->{buffer}) >= $at + 5)
	{
		my ($type, $length) = unpack('a N', substr($self->{buffer}, $at, 5));
		return 1 if $type eq 'Z';
		$at += $length + 1;
	}
	return 0;
}

# Enters one message into the result; true if it was the last.
sub _take
{
	my ($self, $result, $type, $body) = @_;
	if ($type eq 'T')
	{
		my $count = unpack('n', $body);
		my @fields = unpack('x2 ' . ('Z* x18' x $count), $body);
		$result->{columns} = \@fields;
		$result->{rows} = [];
	}
	elsif ($type eq 'D')
	{
		my $count = unpack('n', $body);
		my $at = 2;
		my @values;
		foreach (1 .. $count)
		{
			my $length = unpack('N', substr($body, $at, 4));
			$at += 4;
			if ($length == 0xffffffff) { push @values, undef; next; }
			push @values, substr($body, $at, $length);
			$at += $length;
		}
		push @{ $result->{rows} }, \@values;
	}
	elsif ($type eq 'E')
	{
		$result->{error} = { map { length($_) ? (substr($_, 0, 1), substr($_, 1)) : () } split /\0/, $body };
	}
	elsif ($type eq 'C') { ($result->{tag}) = unpack('Z*', $body); }
	elsif ($type eq 'K') { $self->{pid} = unpack('N', $body); }
	elsif ($type eq 'R')
	{
		die 'the server asks for a password' if unpack('N', $body) != 0;
	}
	elsif ($type eq 'Z') { $self->{status} = $body; return 1; }
	return 0;
}

1;
