/*-------------------------------------------------------------------------
 *
 * sleep.h
 *	  Sleeps that a cancel, a shutdown or the postmaster's death ends.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SLEEP_H
#define IDEM_SLEEP_H

#include "postgres.h"

extern void idem_sleep_once(long milliseconds, uint32 wait_event);
extern void idem_sleep_between_batches(int64 microseconds);

#endif							/* IDEM_SLEEP_H */
