/*-------------------------------------------------------------------------
 *
 * sweeper.h
 *	  The process that sweeps one database for a moment, seen from the
 *	  launcher.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SWEEPER_H
#define IDEM_SWEEPER_H

#include "postgres.h"

#include "health.h"
#include "sweep.h"

typedef enum IdemVisitEnd
{
	IDEM_VISIT_DONE,
	IDEM_VISIT_FAILED,			/* the error tells why */
	IDEM_VISIT_LOST,			/* the same; nothing more is known */
	IDEM_VISIT_LOST_AT_ROW,		/* the same, in the deletion of sweep.deadly */
	IDEM_VISIT_ENDED,			/* somebody has ended it; the database may be on its way out */
	IDEM_VISIT_NOT_NOW,			/* the database is locked, or gone */
	IDEM_VISIT_NO_SLOT			/* no sweeper could be started */
} IdemVisitEnd;

typedef struct IdemVisit
{
	Oid			database;
	IdemSweep	sweep;			/* given, and taken further */
	int64		estimate;		/* the same; 0: not known */
	bool		has_extension;	/* as far as is known */
	int			pause;			/* before the next batch, milliseconds */
	bool		health;			/* to be looked at too */
	bool		only_health;	/* and nothing swept */
	IdemHealthMemory memory;	/* given, and taken further */
	int64		deleted;		/* by this visit */
	char		error[IDEM_ERROR_SIZE];		/* that has ended it, or empty */
} IdemVisit;

extern IdemVisitEnd idem_visit(IdemVisit *visit);
extern PGDLLEXPORT void idem_sweeper_main(Datum arg);

#endif							/* IDEM_SWEEPER_H */
