/*-------------------------------------------------------------------------
 *
 * deleter.c
 *	  As whom a row is deleted.
 *
 * Foreign code runs as the table's owner, who has let it in: a trigger needs
 * his TRIGGER privilege.  With one exception, since REFERENCES is given away
 * lightly.  A foreign key with ON DELETE CASCADE takes the rows of a table
 * along, in whose owner's name; but before PostgreSQL 18 the triggers of that
 * table are fired with ours, in the name of whoever is current then.  So a
 * deletion that goes on to the table of another role, directly or over others,
 * is done in that role's name from the beginning.  There can be one such role
 * only, whose triggers no one else's may run beside; superusers are none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/indexing.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_trigger.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/reltrigger.h"
#include "utils/syscache.h"

#include "compat.h"
#include "deleter.h"

/* Does a trigger of that function change the rows that refer to a deleted one? */
static bool
goes_on(Oid function)
{
	return function == F_RI_FKEY_CASCADE_DEL || function == F_RI_FKEY_SETNULL_DEL ||
		function == F_RI_FKEY_SETDEFAULT_DEL;
}

/* InvalidOid if the table is gone. */
static Oid
owner_of(Oid relid)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Oid			owner = InvalidOid;

	if (HeapTupleIsValid(tuple))
	{
		owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
		ReleaseSysCache(tuple);
	}
	return owner;
}

/* Adds the tables, with their partitions, to which a deletion in this one goes on. */
static List *
add_reached(List *reached, Relation triggers, Oid relid)
{
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, Anum_pg_trigger_tgrelid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	scan = systable_beginscan(triggers, TriggerRelidNameIndexId, true, NULL, 1, &key);
	while ((tuple = systable_getnext(scan)) != NULL)
	{
		Form_pg_trigger trigger = (Form_pg_trigger) GETSTRUCT(tuple);

		if (goes_on(trigger->tgfoid))
			reached = list_concat_unique_oid(reached,
											 find_all_inheritors(trigger->tgconstrrelid, NoLock, NULL));
	}
	systable_endscan(scan);
	return reached;
}

static List *
reached_from(Oid relid)
{
	Relation	triggers = table_open(TriggerRelationId, AccessShareLock);
	List	   *reached = add_reached(NIL, triggers, relid);

	/* It grows meanwhile, and ends, since each table is in it once. */
	for (int i = 0; i < list_length(reached); i++)
		reached = add_reached(reached, triggers, list_nth_oid(reached, i));
	table_close(triggers, AccessShareLock);
	return reached;
}

/* Are there DELETE triggers of the table itself, and foreign keys that go on? */
static void
kinds_of_triggers(const TriggerDesc *triggers, bool *own, bool *going_on)
{
	*own = *going_on = false;
	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		const Trigger *trigger = &triggers->triggers[i];

		*own |= !trigger->tgisinternal && TRIGGER_FOR_DELETE(trigger->tgtype);
		*going_on |= goes_on(trigger->tgfoid);
	}
}

static void
refuse(const char *detail, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("cannot delete idempotency keys that another role's table refers to with ON DELETE CASCADE, SET NULL or SET DEFAULT"),
			 errdetail_internal("%s", detail),
			 errhint("%s", hint)));
}

/* Sets others if code of another role than that of the table may run. */
Oid
idem_deleter(Relation rel, bool *others)
{
	Oid			owner = rel->rd_rel->relowner;
	Oid			deleter = owner;
	bool		own;
	bool		going_on;
	List	   *reached;
	ListCell   *lc;

	kinds_of_triggers(rel->trigdesc, &own, &going_on);
	if (!going_on)
		return owner;

	reached = reached_from(RelationGetRelid(rel));
	foreach(lc, reached)
	{
		Oid			other = owner_of(lfirst_oid(lc));

		if (!OidIsValid(other) || other == owner || superuser_arg(other))
			continue;
		*others = true;
		if (IDEM_TRIGGERS_KNOW_THEIR_ROLE || other == deleter)
			continue;
		if (deleter != owner)
			refuse("There are tables of two such roles, and triggers of one would run as the other.",
				   "Let one role own these tables.");
		if (own)
			refuse("The triggers of the keys would run as that role.",
				   "Drop these triggers or the foreign key, or have the other table owned as the keys are.");
		deleter = other;
	}
	list_free(reached);
	return deleter;
}
