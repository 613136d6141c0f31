/*-------------------------------------------------------------------------
 *
 * databases.c
 *	  The databases, as the launcher knows them.
 *
 * pg_database is the only thing it reads.  What it has learnt about a database
 * is kept by OID from one reading to the next, in a memory context of each
 * reading's own, so nothing of a dropped database stays.  It is no more than a
 * memory: a launcher that starts anew visits each database once.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/pg_database.h"
#include "nodes/pg_list.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/relcache.h"
#include "utils/snapmgr.h"
#include "utils/varlena.h"

#include "databases.h"
#include "settings.h"

/* What DROP DATABASE, interrupted, leaves in datconnlimit (from 14.9 on). */
#define CONNLIMIT_INVALID (-2)

static MemoryContext context = NULL;
static IdemDatabase *databases = NULL;	/* by OID */
static int	ndatabases = 0;

/* The setting: '*', or a list of names, written as identifiers are in SQL. */
bool
idem_check_databases(char **newval, void **extra, GucSource source)
{
	char	   *copy = pstrdup(*newval);
	List	   *names;
	bool		valid = SplitIdentifierString(copy, ',', &names);

	if (!valid)
	{
		GUC_check_errdetail("List syntax is invalid.");
		GUC_check_errhint("Give names as in SQL, separated by commas, or * for all databases that have the extension.");
	}
	list_free(names);
	pfree(copy);
	return valid;
}

static bool
is_wanted(const char *name, List *names)
{
	ListCell   *lc;

	foreach(lc, names)
	{
		const char *wanted = lfirst(lc);

		if (strcmp(wanted, "*") == 0 || strcmp(wanted, name) == 0)
			return true;
	}
	return false;
}

static bool
is_open(Form_pg_database form)
{
	return form->datallowconn && !form->datistemplate && form->datconnlimit != CONNLIMIT_INVALID;
}

static int
compare(const void *a, const void *b)
{
	Oid			oa = ((const IdemDatabase *) a)->oid;
	Oid			ob = ((const IdemDatabase *) b)->oid;

	return oa < ob ? -1 : oa > ob;
}

IdemDatabase *
idem_database_by_oid(Oid oid)
{
	IdemDatabase key = {0};

	key.oid = oid;
	return ndatabases == 0 ? NULL :
		bsearch(&key, databases, ndatabases, sizeof(IdemDatabase), compare);
}

int
idem_databases(IdemDatabase **result)
{
	*result = databases;
	return ndatabases;
}

/* Adds one that is new, or what is known of it. */
static IdemDatabase *
add(IdemDatabase *new, int *n, int *room, Form_pg_database form)
{
	IdemDatabase *known = idem_database_by_oid(form->oid);

	if (*n == *room)
	{
		*room *= 2;
		new = repalloc_huge(new, *room * sizeof(IdemDatabase));
	}
	if (known != NULL)
		new[*n] = *known;
	else
	{
		memset(&new[*n], 0, sizeof(IdemDatabase));
		new[*n].oid = form->oid;
	}
	new[*n].name = form->datname;
	(*n)++;
	return new;
}

/* Reads pg_database anew, in a transaction of its own. */
void
idem_databases_read(void)
{
	MemoryContext fresh = AllocSetContextCreate(TopMemoryContext, "idempotency databases",
												ALLOCSET_DEFAULT_SIZES);
	MemoryContext old = CurrentMemoryContext;
	int			room = 16;
	int			n = 0;
	IdemDatabase *new = MemoryContextAlloc(fresh, room * sizeof(IdemDatabase));
	List	   *names;
	Relation	rel;
	TableScanDesc scan;
	HeapTuple	tuple;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	(void) SplitIdentifierString(pstrdup(idem_database_names), ',', &names);
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);

		if (is_open(form) && is_wanted(NameStr(form->datname), names))
			new = add(new, &n, &room, form);
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	CommitTransactionCommand();
	MemoryContextSwitchTo(old);

	qsort(new, n, sizeof(IdemDatabase), compare);
	databases = new;
	ndatabases = n;
	if (context != NULL)
		MemoryContextDelete(context);
	context = fresh;
}

/* May a sweeper connect to it, as things stand now?  In a transaction. */
bool
idem_database_is_open(Oid oid)
{
	Relation	rel = table_open(DatabaseRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		open;

	ScanKeyInit(&key, Anum_pg_database_oid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(oid));
	scan = systable_beginscan(rel, DatabaseOidIndexId, criticalSharedRelcachesBuilt, NULL, 1, &key);
	tuple = systable_getnext(scan);
	open = HeapTupleIsValid(tuple) && is_open((Form_pg_database) GETSTRUCT(tuple));
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return open;
}
