/*
 * clock.c - a wall clock that a test can set, and a clock that runs faster.
 *
 * To be preloaded into a server.  gettimeofday(), which is where PostgreSQL
 * takes its time from, gives the machine's time plus the microseconds that the
 * file $IDEM_TEST_CLOCK holds as one int64.  The monotonic clock, and with it
 * every sleep, goes on as it is, as when somebody sets a machine's clock.
 *
 * The monotonic clock, by which durations are measured, runs $IDEM_TEST_SPEED
 * times as fast as it should; sleeps are as long as they were.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;
static int64_t speed = 1;

__attribute__((constructor))
static void
open_clock(void)
{
	const char *path = getenv("IDEM_TEST_CLOCK");
	const char *factor = getenv("IDEM_TEST_SPEED");
	int			fd = path != NULL ? open(path, O_RDONLY) : -1;
	void	   *map = fd >= 0 ? mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;

	if (factor != NULL)
		speed = atoll(factor);
	if (fd >= 0)
		close(fd);
	if (map != MAP_FAILED)
		offset = map;
}

int
gettimeofday(struct timeval *restrict tv, void *restrict tz)
{
	struct timespec now;
	int64_t		us;

	(void) tz;
	clock_gettime(CLOCK_REALTIME, &now);
	us = now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000 + (offset != NULL ? *offset : 0);
	tv->tv_sec = us / 1000000;
	tv->tv_usec = us % 1000000;
	return 0;
}

int
clock_gettime(clockid_t clock, struct timespec *time)
{
	int			result = (int) syscall(SYS_clock_gettime, clock, time);

	if (result == 0 && clock == CLOCK_MONOTONIC && speed != 1)
	{
		int64_t		ns = (time->tv_sec * INT64_C(1000000000) + time->tv_nsec) * speed;

		time->tv_sec = ns / 1000000000;
		time->tv_nsec = ns % 1000000000;
	}
	return result;
}
