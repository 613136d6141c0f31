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
 * deletion that goes on to tables of another role is done in that role's name
 * from the beginning.
 *
 * That is safe for everybody only if nobody else's code runs in it: all tables
 * that are reached, over whatever other ones, have to be that one role's, and
 * the keys themselves without DELETE triggers.  Superusers count as one, with
 * an owner of the keys who is one too.  What is not so is refused.
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
#include "storage/lmgr.h"
#include "utils/catcache.h"
#include "utils/fmgroids.h"
#include "utils/reltrigger.h"
#include "utils/syscache.h"

#include "deleter.h"

/* Does a trigger of that function change the rows that refer to a deleted one? */
static bool
goes_on_from_delete(Oid function)
{
	return function == F_RI_FKEY_CASCADE_DEL || function == F_RI_FKEY_SETNULL_DEL ||
		function == F_RI_FKEY_SETDEFAULT_DEL;
}

/* The same, of rows that were set to null or to their default. */
static bool
goes_on_from_update(Oid function)
{
	return function == F_RI_FKEY_CASCADE_UPD || function == F_RI_FKEY_SETNULL_UPD ||
		function == F_RI_FKEY_SETDEFAULT_UPD;
}

/* Why is all in the message, which is what a sweep passes on. */
static void
refuse(const char *why, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("cannot delete idempotency keys together with what refers to them: %s", why),
			 errhint("%s", hint)));
}

/*
 * Adds the tables, with their partitions, to which a deletion in this one, or
 * after the first one an update, goes on.  They are locked, as the deletion will
 * do, so that what is found stays so.
 */
static List *
add_reached(List *reached, Relation triggers, Oid relid, bool first)
{
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	List	   *next = NIL;
	ListCell   *lc;

	ScanKeyInit(&key, Anum_pg_trigger_tgrelid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	scan = systable_beginscan(triggers, TriggerRelidNameIndexId, true, NULL, 1, &key);
	while ((tuple = systable_getnext(scan)) != NULL)
	{
		Form_pg_trigger trigger = (Form_pg_trigger) GETSTRUCT(tuple);

		if (goes_on_from_delete(trigger->tgfoid) ||
			(!first && goes_on_from_update(trigger->tgfoid)))
			next = list_append_unique_oid(next, trigger->tgconstrrelid);
	}
	systable_endscan(scan);

	foreach(lc, next)
	{
		Oid			other = lfirst_oid(lc);

		LockRelationOid(other, RowExclusiveLock);
		if (SearchSysCacheExists1(RELOID, ObjectIdGetDatum(other)))
			reached = list_concat_unique_oid(reached,
											 find_all_inheritors(other, RowExclusiveLock, NULL));
	}
	list_free(next);
	return reached;
}

static List *
reached_from(Oid relid)
{
	Relation	triggers = table_open(TriggerRelationId, AccessShareLock);
	List	   *reached = add_reached(NIL, triggers, relid, true);

	/* It grows meanwhile, and ends, since each table is in it once. */
	for (int i = 0; i < list_length(reached); i++)
		reached = add_reached(reached, triggers, list_nth_oid(reached, i), false);
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
		*going_on |= goes_on_from_delete(trigger->tgfoid);
	}
}

/* relhasrules outlives the last one. */
static bool
has_rules(Oid relid)
{
	CatCList   *list = SearchSysCacheList1(RULERELNAME, ObjectIdGetDatum(relid));
	bool		found = list->n_members > 0;

	ReleaseSysCacheList(list);
	return found;
}

/* The owner of a table that is reached, all superusers being the keys' owner. */
static Oid
owner_of(Oid relid, Oid keys_owner)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Form_pg_class form;
	Oid			owner;
	bool		rules;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for relation %u", relid);
	form = (Form_pg_class) GETSTRUCT(tuple);
	owner = form->relowner;
	rules = form->relhasrules && has_rules(relid);
	ReleaseSysCache(tuple);
	if (rules)
		refuse("a table that would be changed has a rule", "Drop the rule, or the foreign key.");
	return superuser_arg(owner) && superuser_arg(keys_owner) ? keys_owner : owner;
}

/* The table's owner, or the other role whose code may run. */
Oid
idem_deleter(Relation rel)
{
	Oid			owner = rel->rd_rel->relowner;
	Oid			deleter = InvalidOid;
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
		Oid			other = owner_of(lfirst_oid(lc), owner);

		if (OidIsValid(deleter) && other != deleter)
			refuse("tables of several roles would be changed, and code of one would run as the other",
				   "Let one role own these tables.");
		deleter = other;
	}
	list_free(reached);
	if (!OidIsValid(deleter) || deleter == owner)
		return owner;
	if (own)
		refuse("the keys have DELETE triggers, which would run as the other table's owner",
			   "Drop these triggers or the foreign key, or have the other table owned as the keys are.");
	return deleter;
}
