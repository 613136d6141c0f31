/*-------------------------------------------------------------------------
 *
 * sleep.c
 *	  Sleeps that a cancel, a shutdown or the postmaster's death ends.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "portability/instr_time.h"
#include "storage/latch.h"

#include "compat.h"
#include "sleep.h"

#define LONGEST_SLEEP (60 * USECS_PER_SEC)

/* For so long, or until the latch is set; the caller looks again. */
void
idem_sleep_once(long milliseconds, uint32 wait_event)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 milliseconds, wait_event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/* For all of that time, whatever the clock is set to meanwhile. */
void
idem_sleep_between_batches(int64 microseconds)
{
	static uint32 wait_event = 0;
	instr_time	start;

	if (wait_event == 0)
		wait_event = idem_wait_event_new("IdempotencySweepPause");
	INSTR_TIME_SET_CURRENT(start);
	for (;;)
	{
		instr_time	now;
		int64		left;

		INSTR_TIME_SET_CURRENT(now);
		INSTR_TIME_SUBTRACT(now, start);
		left = microseconds - (int64) INSTR_TIME_GET_MICROSEC(now);
		if (left <= 0)
			break;
		idem_sleep_once((long) ((Min(left, LONGEST_SLEEP) + 999) / 1000), wait_event);
	}
}
