/*-------------------------------------------------------------------------
 *
 * survey.h
 *	  What there is in idempotency_keys: rows by state, and bytes.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SURVEY_H
#define IDEM_SURVEY_H

#include "store.h"
#include "ticks.h"

typedef struct IdemSurvey
{
	TimestampTz now;
	IdemTicks	until;			/* in: when a sample or count ends; 0: never */
	TimestampTz stuck_since;	/* in: a lease that ended before is a stuck claim's */
	int64		rows[IDEM_NSTATUS]; /* live ones, as they stand now */
	int64		expired;
	TimestampTz oldest;			/* when the first of these expired, or DT_NOEND */
	int64		stuck;			/* of the processing ones */
	int64		stuck_clump;	/* the most of them on one page of a sample */
	int64		bytes;			/* of rows in the heap */
	double		scale;			/* a sample's counts times this are the table's */
} IdemSurvey;

/* Rows found by due_at. */
typedef struct IdemDueRows
{
	int64		rows;
	TimestampTz oldest;			/* the first expiry, or DT_NOEND */
	bool		all;			/* or there may be more */
} IdemDueRows;

extern void idem_survey(IdemStore *store, IdemSurvey *survey);
extern void idem_survey_sample(IdemStore *store, IdemSurvey *survey);
extern IdemDueRows idem_expired_rows(IdemStore *store, int64 limit, IdemTicks until);
extern IdemDueRows idem_held_rows(IdemStore *store, int64 limit, IdemTicks until);

#endif							/* IDEM_SURVEY_H */
