/*-------------------------------------------------------------------------
 *
 * wait.h
 *	  Waiting until a key may have changed.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WAIT_H
#define IDEM_WAIT_H

#include "postgres.h"

#include "datatype/timestamp.h"

typedef struct IdemWait
{
	TimestampTz start;
	TimestampTz deadline;
	int64		pause;			/* the next one, in microseconds */
} IdemWait;

extern void idem_wait_begin(IdemWait *wait, int64 duration);
extern bool idem_wait_is_over(const IdemWait *wait, bool briefly);
extern void idem_wait_pause(IdemWait *wait, TimestampTz lease_until);

#endif							/* IDEM_WAIT_H */
