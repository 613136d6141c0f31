/*-------------------------------------------------------------------------
 *
 * health.h
 *	  Is there anything an administrator should see to?
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_HEALTH_H
#define IDEM_HEALTH_H

#include "chance.h"

/* What the launcher remembers of a database between two reports. */
typedef struct IdemHealthMemory
{
	uint32		bad_items;		/* if there are no counters that know it */
	IdemTrial	stuck_claims;	/* what its samples have said so far */
	double		threshold;		/* of that */
} IdemHealthMemory;

extern void idem_health_report(IdemHealthMemory *memory);

#endif							/* IDEM_HEALTH_H */
