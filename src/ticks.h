/*-------------------------------------------------------------------------
 *
 * ticks.h
 *	  A clock that nobody sets, and sleeps.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_TICKS_H
#define IDEM_TICKS_H

#include "postgres.h"

typedef int64 IdemTicks;		/* microseconds since some instant */

extern IdemTicks idem_ticks(void);
extern IdemTicks idem_ticks_after(IdemTicks then, int64 milliseconds);
extern bool idem_ticks_passed(IdemTicks until);
extern void idem_sleep_once(int64 milliseconds, uint32 wait_event);
extern void idem_sleep_between_batches(int64 microseconds);

#endif							/* IDEM_TICKS_H */
