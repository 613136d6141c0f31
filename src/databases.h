/*-------------------------------------------------------------------------
 *
 * databases.h
 *	  The databases, as the launcher knows them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_DATABASES_H
#define IDEM_DATABASES_H

#include "postgres.h"

#include "datatype/timestamp.h"
#include "utils/guc.h"

#include "health.h"
#include "sweep.h"
#include "ticks.h"

typedef struct IdemDatabase
{
	Oid			oid;
	NameData	name;
	IdemTicks	due;			/* when to visit it */
	IdemTicks	health_due;		/* when to have its health looked at */
	bool		has_extension;	/* at the last visit */
	bool		failing;		/* there was a WARNING, and no LOG line since */
	int			failures;		/* visits in a row that ended in an error */
	IdemHealthMemory memory;
	IdemSweep	sweep;			/* one that goes on over several visits */
	int64		estimate;		/* rows it has before it, all in all */
} IdemDatabase;

extern bool idem_check_databases(char **newval, void **extra, GucSource source);
extern void idem_databases_read(void);
extern int	idem_databases(IdemDatabase **databases);
extern IdemDatabase *idem_database_by_oid(Oid oid);
extern bool idem_database_is_open(Oid oid);

#endif							/* IDEM_DATABASES_H */
