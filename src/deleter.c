/*-------------------------------------------------------------------------
 *
 * deleter.c
 *	  As whom a row is deleted.
 *
 * Foreign code runs as the table's owner, who has let it in: a trigger needs
 * his TRIGGER privilege.  With one exception, since REFERENCES is given away
 * lightly.  A foreign key with ON DELETE CASCADE takes the rows of a table
 * along, in whose owner's name; but the triggers of that table are fired with
 * ours, in the name of whoever is current then.  So a deletion that goes on to
 * the table of another role is done in that role's name from the beginning.
 * There can be one such role only, and superusers are none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_class.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/reltrigger.h"
#include "utils/syscache.h"

#include "deleter.h"

/* Does the trigger change the rows that refer to a deleted one? */
static bool
goes_on(const Trigger *trigger)
{
	return trigger->tgfoid == F_RI_FKEY_CASCADE_DEL ||
		trigger->tgfoid == F_RI_FKEY_SETNULL_DEL ||
		trigger->tgfoid == F_RI_FKEY_SETDEFAULT_DEL;
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

Oid
idem_deleter(Relation rel)
{
	Oid			owner = rel->rd_rel->relowner;
	Oid			deleter = owner;

	for (int i = 0; rel->trigdesc != NULL && i < rel->trigdesc->numtriggers; i++)
	{
		const Trigger *trigger = &rel->trigdesc->triggers[i];
		Oid			other;

		if (!goes_on(trigger))
			continue;
		other = owner_of(trigger->tgconstrrelid);
		if (!OidIsValid(other) || other == deleter || other == owner || superuser_arg(other))
			continue;
		if (deleter != owner)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("cannot delete idempotency keys that tables of different owners refer to with ON DELETE CASCADE, SET NULL or SET DEFAULT"),
					 errdetail("Triggers of one owner would run as the other."),
					 errhint("Let one role own these tables.")));
		deleter = other;
	}
	return deleter;
}
