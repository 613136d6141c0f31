/*-------------------------------------------------------------------------
 *
 * ticks.c
 *	  A clock that nobody sets, and sleeps.
 *
 * When a key expires is a matter of the wall clock; how long the sweeper has
 * been at it, and when it is to come again, is not, and must not wait for hours
 * because somebody has set the clock back.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "datatype/timestamp.h"
#include "miscadmin.h"
#include "portability/instr_time.h"
#include "storage/latch.h"

#include "compat.h"
#include "ticks.h"

#define LONGEST_SLEEP INT64CONST(60000)	/* milliseconds */

IdemTicks
idem_ticks(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (IdemTicks) INSTR_TIME_GET_MICROSEC(now);
}

IdemTicks
idem_ticks_after(IdemTicks then, int64 milliseconds)
{
	return then + milliseconds * 1000;
}

/* Has that time come?  0 never does. */
bool
idem_ticks_passed(IdemTicks until)
{
	return until != 0 && idem_ticks() >= until;
}

/* For so long, or until the latch is set, or so; the caller looks again. */
void
idem_sleep_once(int64 milliseconds, uint32 wait_event)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 (long) Min(milliseconds, LONGEST_SLEEP), wait_event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/* For all of that time. */
void
idem_sleep_between_batches(int64 microseconds)
{
	static uint32 wait_event = 0;
	IdemTicks	until = idem_ticks() + microseconds;
	IdemTicks	now;

	if (wait_event == 0)
		wait_event = idem_wait_event_new("IdempotencySweepPause");
	while ((now = idem_ticks()) < until)
		idem_sleep_once((until - now + 999) / 1000, wait_event);
}
