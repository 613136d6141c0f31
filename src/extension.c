/*-------------------------------------------------------------------------
 *
 * extension.c
 *	  Where the extension's objects are in this database, kept until they
 *	  change.
 *
 * The table's OID, its primary key and the enums' values are looked up once a
 * session.  A relcache callback counts the changes to any of them; it does
 * nothing else, since it may be called where catalogs can't be read.  What is
 * kept counts as true only if, with the table locked (which is when pending
 * invalidations are taken in), nothing was counted since it was read.  So a
 * session lives through DROP and CREATE EXTENSION, a CREATE that was rolled
 * back, ALTER TABLE and ALTER EXTENSION ... SET SCHEMA.
 *
 * Here too it is decided, once, whether the table is still one the direct
 * write path can serve: what it could not honour is refused, not ignored.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "catalog/dependency.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_enum.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

#include "extension.h"

typedef struct ColumnShape
{
	const char *name;
	Oid			type;			/* InvalidOid: idem_status */
	bool		required;		/* NOT NULL */
} ColumnShape;

static const ColumnShape shape[IDEM_NCOLUMNS] = {
	{"created_at", TIMESTAMPTZOID, true},
	{"claimed_at", TIMESTAMPTZOID, true},
	{"token", INT8OID, true},
	{"due_at", TIMESTAMPTZOID, true},
	{"ttl", INTERVALOID, true},
	{"attempt", INT4OID, true},
	{"takeover", BOOLOID, true},
	{"scope", TEXTOID, true},
	{"key", TEXTOID, true},
	{"operation", TEXTOID, true},
	{"request_hash", BYTEAOID, false},
	{"status", InvalidOid, true},
	{"lease_until", TIMESTAMPTZOID, false},
	{"expires_at", TIMESTAMPTZOID, true},
	{"completed_at", TIMESTAMPTZOID, false},
	{"retry_at", TIMESTAMPTZOID, false},
	{"http_status", INT4OID, false},
	{"checkpoint", TEXTOID, false},
	{"state", JSONBOID, false},
	{"headers", JSONBOID, false},
	{"response", JSONBOID, false},
	{"body", BYTEAOID, false},
	{"resolved_by", TEXTOID, false},
	{"note", TEXTOID, false},
};

static const char *const status_labels[IDEM_NSTATUS] =
{"processing", "completed", "failed", "retryable", "unknown"};
static const char *const outcome_labels[IDEM_NOUTCOME] =
{"claimed", "processing", "completed", "failed", "retryable", "unknown", "mismatch"};
static const char *const disposition_labels[IDEM_NDISPOSITION] =
{"final", "retry", "unknown"};

static IdemTable cached;
static IdemTable fresh;			/* the one to come, while it is built */
static bool cache_built = false;
static uint64 cache_built_at;	/* value of changes when it was built */
static uint64 changes = 0;
static Oid	result_relids[2];	/* of the result types */
static MemoryContext cache_context = NULL;

static void
count_change(Datum arg, Oid relid)
{
	if (relid == InvalidOid || relid == cached.relid || relid == cached.sequence ||
		relid == fresh.relid || relid == fresh.sequence ||
		relid == result_relids[0] || relid == result_relids[1])
		changes++;
}

void
idem_extension_init(void)
{
	CacheRegisterRelcacheCallback(count_change, (Datum) 0);
}

/* A number that another one follows when what is known may no longer be true. */
uint64
idem_extension_changes(void)
{
	return changes;
}

/*
 * Reads pg_extension by name; false if the extension isn't in this database.
 */
bool
idem_find_extension(Oid *extension, Oid *schema)
{
	Relation	rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		found;

	ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber, F_NAMEEQ,
				CStringGetDatum(IDEM_EXTENSION));
	scan = systable_beginscan(rel, ExtensionNameIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	found = HeapTupleIsValid(tuple);
	if (found)
	{
		*extension = ((Form_pg_extension) GETSTRUCT(tuple))->oid;
		*schema = ((Form_pg_extension) GETSTRUCT(tuple))->extnamespace;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return found;
}

static void
altered(const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"%s\" is not as extension \"%s\" made it", IDEM_TABLE, IDEM_EXTENSION),
			 errdetail_internal("%s", detail),
			 errhint("Undo the change, or move the rows to a table of a newly created extension. "
					 "If nothing was changed, this session runs a library of another version: connect again, "
					 "or restart a server that preloads it.")));
}

/* Finds table and sequence; returns what is wrong with them, or NULL. */
static const char *
find_relations(Oid extension)
{
	fresh.relid = get_relname_relid(IDEM_TABLE, fresh.schema);
	if (!OidIsValid(fresh.relid))
		return "The table is not in the extension's schema.";
	if (getExtensionOfObject(RelationRelationId, fresh.relid) != extension)
		return "The table does not belong to the extension.";

	fresh.sequence = get_relname_relid(IDEM_SEQUENCE, fresh.schema);
	if (!OidIsValid(fresh.sequence) ||
		get_rel_relkind(fresh.sequence) != RELKIND_SEQUENCE)
		return "The sequence of the tokens is gone.";
	return NULL;
}

/*
 * Sets the OIDs by name.  Nothing is locked yet, so the extension may move to
 * another schema, or be created anew, meanwhile: then they are looked for again.
 */
static void
locate(void)
{
	Oid			extension = InvalidOid;
	const char *fault;

	cache_built = false;
	fresh.schema = InvalidOid;
	do
	{
		Oid			last_extension = extension;
		Oid			last_schema = fresh.schema;

		if (!idem_find_extension(&extension, &fresh.schema))
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_OBJECT),
					 errmsg("extension \"%s\" is not installed in this database", IDEM_EXTENSION),
					 errhint("Run CREATE EXTENSION %s.", IDEM_EXTENSION)));
		fault = find_relations(extension);
		if (fault != NULL && extension == last_extension && fresh.schema == last_schema)
			altered(fault);
	} while (fault != NULL);
}

static Oid
type_by_name(const char *name)
{
	Oid			type = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid,
									   CStringGetDatum(name),
									   ObjectIdGetDatum(fresh.schema));

	if (!OidIsValid(type))
		altered(psprintf("The type \"%s\" is not in the extension's schema.", name));
	return type;
}

static void
load_enum(Oid type, const char *const *labels, int nlabels, Oid *values)
{
	for (int i = 0; i < nlabels; i++)
	{
		values[i] = GetSysCacheOid2(ENUMTYPOIDNAME, Anum_pg_enum_oid,
									ObjectIdGetDatum(type),
									CStringGetDatum(labels[i]));
		if (!OidIsValid(values[i]))
			altered(psprintf("The enum value \"%s\" is gone.", labels[i]));
	}
}

static void
check_columns(TupleDesc desc, Oid status_type)
{
	if (desc->natts < IDEM_NCOLUMNS)
		altered("A column is missing.");

	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (i >= IDEM_NCOLUMNS)
		{
			/* A column somebody added: its default is ours to fill in. */
			if (att->attgenerated != '\0')
				altered(psprintf("Column \"%s\" is a generated one.", NameStr(att->attname)));
			if (!att->attisdropped)
			{
				if (get_typtype(att->atttypid) == TYPTYPE_DOMAIN)
					altered(psprintf("Column \"%s\" is of a domain.", NameStr(att->attname)));
				fresh.foreign_code = true;
			}
			continue;
		}
		if (att->attisdropped ||
			strcmp(NameStr(att->attname), shape[i].name) != 0 ||
			att->atttypid != (OidIsValid(shape[i].type) ? shape[i].type : status_type) ||
			att->attgenerated != '\0' || (shape[i].required && !att->attnotnull))
			altered(psprintf("Column \"%s\" is missing, not in its place, of another type or no longer NOT NULL.",
							 shape[i].name));
	}
}

/*
 * Does it compute anything?  The relation cache would hand out expressions with
 * their constants folded, which may be anybody's code.
 */
static bool
has_expressions(Relation index)
{
	return !heap_attisnull(index->rd_indextuple, Anum_pg_index_indexprs, NULL) ||
		!heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL);
}

static bool
is_pkey(Relation index)
{
	Form_pg_index form = index->rd_index;

	return form->indisprimary && form->indisvalid && form->indimmediate &&
		form->indnkeyatts == 2 &&
		form->indkey.values[0] == IDEM_COL_SCOPE &&
		form->indkey.values[1] == IDEM_COL_KEY &&
		index->rd_indcollation[0] == C_COLLATION_OID &&
		index->rd_indcollation[1] == C_COLLATION_OID;
}

static bool
is_due_index(Relation index)
{
	Form_pg_index form = index->rd_index;

	return index->rd_rel->relam == BTREE_AM_OID && form->indisvalid &&
		!form->indisunique && !form->indisexclusion &&
		form->indnkeyatts == 1 && form->indkey.values[0] == IDEM_COL_DUE_AT &&
		(index->rd_indoption[0] & INDOPTION_DESC) == 0 &&
		!has_expressions(index);
}

/*
 * No index is locked, because a sweep that looks here must not wait for a
 * REINDEX.  What is done to an index is told to all as a change of the table.
 */
static void
check_indexes(Relation rel)
{
	ListCell   *lc;

	fresh.pkey = InvalidOid;
	fresh.due_index = InvalidOid;
	foreach(lc, RelationGetIndexList(rel))
	{
		Relation	index = RelationIdGetRelation(lfirst_oid(lc));

		if (!RelationIsValid(index))
			continue;			/* dropped concurrently */
		if (is_pkey(index))
			fresh.pkey = RelationGetRelid(index);
		else if (is_due_index(index))
			fresh.due_index = RelationGetRelid(index);
		else if ((index->rd_index->indisunique || index->rd_index->indisexclusion) &&
				 index->rd_index->indisvalid)	/* else it may be REINDEX CONCURRENTLY's copy */
			altered("It has another unique or exclusion constraint, for which a claim would have to wait.");
		else if (has_expressions(index))
			fresh.foreign_code = true;
		RelationClose(index);
	}
	if (!OidIsValid(fresh.pkey))
		altered("The primary key (scope, key), in collation \"C\" and not deferrable, is missing.");
}

static void
check_triggers(TriggerDesc *triggers)
{
	if (triggers == NULL)
		return;
	if (triggers->trig_insert_before_row || triggers->trig_insert_before_statement ||
		triggers->trig_insert_after_statement || triggers->trig_insert_new_table ||
		triggers->trig_update_before_row || triggers->trig_update_before_statement ||
		triggers->trig_update_after_statement || triggers->trig_update_new_table ||
		triggers->trig_update_old_table ||
		triggers->trig_delete_before_row || triggers->trig_delete_before_statement ||
		triggers->trig_delete_after_statement || triggers->trig_delete_old_table)
		altered("It has a BEFORE or a statement-level trigger; AFTER ROW triggers are the ones that are run.");
	for (int i = 0; i < triggers->numtriggers; i++)
	{
		const Trigger *trigger = &triggers->triggers[i];

		if (trigger->tgnattr > 0)
			altered("It has a trigger on the update of certain columns; one for any column would be run.");
		if (trigger->tgdeferrable && !trigger->tgisinternal)
			altered("It has a deferrable trigger, which would not run as the table's owner.");
	}
	fresh.foreign_code = true;
}

static void
check_kind(Relation rel)
{
	if (rel->rd_rel->relkind != RELKIND_RELATION || rel->rd_rel->relam != HEAP_TABLE_AM_OID)
		altered("It is not an ordinary heap table.");
	if (rel->rd_rel->relispartition)
		altered("It is a partition.");
	if (rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		altered("It is unlogged, so a crash would forget which requests have run.");
	if (rel->rd_rules != NULL)	/* relhasrules outlives the last one */
		altered("It has a rule.");
}

/* A copy of a result type, which is filled in by position. */
static TupleDesc
load_result_type(const char *name, int natts, Oid outcome_type, Oid *relid)
{
	static const Oid types[IDEM_NEXECUTE] = {
		InvalidOid, INT8OID, INT4OID, INT4OID, JSONBOID, JSONBOID, BYTEAOID, TEXTOID, JSONBOID,
		TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID, INTERVALOID, BOOLOID
	};
	Oid			type = type_by_name(name);
	TupleDesc	desc = lookup_rowtype_tupdesc_copy(type, -1);
	bool		same = desc->natts == natts;

	*relid = get_typ_typrelid(type);
	for (int i = 0; same && i < natts; i++)
		same = TupleDescAttr(desc, i)->atttypid == (i == 0 ? outcome_type : types[i]);
	if (!same)
		altered(psprintf("The type \"%s\" has other columns.", name));
	return desc;
}

/* The last copies stay until new ones are there: they may be in use. */
static void
load_result_types(Oid outcome_type)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "idempotency",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext old = MemoryContextSwitchTo(context);
	TupleDesc	claim_desc = load_result_type("idem_claim_result", IDEM_NCLAIM, outcome_type,
											  &result_relids[0]);
	TupleDesc	execute_desc = load_result_type("idem_execute_result", IDEM_NEXECUTE,
												outcome_type, &result_relids[1]);

	MemoryContextSwitchTo(old);
	MemoryContextSetParent(context, CacheMemoryContext);
	if (cache_context != NULL)
		MemoryContextDelete(cache_context);
	cache_context = context;
	fresh.claim_desc = claim_desc;
	fresh.execute_desc = execute_desc;
}

/*
 * Adds to the OIDs that locate() found all the rest; the table is locked.  An error
 * leaves what was known: whoever has called us, through code that isn't ours,
 * may be in the midst of a write.
 */
static void
build(Relation rel)
{
	Oid			status_type = type_by_name("idem_status");
	Oid			outcome_type = type_by_name("idem_outcome");

	fresh.foreign_code = rel->rd_att->constr != NULL && rel->rd_att->constr->num_check > 0;
	check_kind(rel);
	check_columns(RelationGetDescr(rel), status_type);
	check_indexes(rel);
	check_triggers(rel->trigdesc);
	load_enum(status_type, status_labels, IDEM_NSTATUS, fresh.status);
	load_enum(outcome_type, outcome_labels, IDEM_NOUTCOME, fresh.outcome);
	load_enum(type_by_name("idem_disposition"), disposition_labels, IDEM_NDISPOSITION,
			  fresh.disposition);
	load_result_types(outcome_type);
	cached = fresh;
}

/*
 * Opens idempotency_keys in the given lock mode, and tells where everything
 * else is.  Raises 42704 without the extension, 55000 for an altered table.
 * Without wait NULL if the lock can't be had at once.
 */
const IdemTable *
idem_open_table(LOCKMODE lockmode, bool wait, Relation *rel)
{
	for (;;)
	{
		uint64		before = changes;
		Oid			relid = cached.relid;

		if (!cache_built || cache_built_at != changes)
		{
			locate();
			relid = fresh.relid;
		}

		/* Invalidations that were sent before we got the lock arrive here. */
		if (wait)
			LockRelationOid(relid, lockmode);
		else if (!ConditionalLockRelationOid(relid, lockmode))
			return NULL;
		if (changes != before)
		{
			UnlockRelationOid(relid, lockmode);
			cache_built = false;
			continue;
		}
		*rel = table_open(relid, NoLock);
		if (cache_built)
			return &cached;

		build(*rel);
		cache_built = true;
		cache_built_at = before;
		if (changes == before)
			return &cached;
		table_close(*rel, lockmode);
	}
}

/* Is the function's result still of the type that the statement was parsed with? */
void
idem_check_result_type(FunctionCallInfo fcinfo, TupleDesc desc)
{
	Oid			type = get_fn_expr_rettype(fcinfo->flinfo);

	if (OidIsValid(type) && type != desc->tdtypeid)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("extension \"%s\" was dropped and created anew while the statement ran",
						IDEM_EXTENSION),
				 errhint("Run the statement again.")));
}

/* The label of a status in SQL. */
const char *
idem_status_name(IdemStatus status)
{
	return status_labels[status];
}

/* Which of the labels is it? */
static int
label_of(const Oid *labels, int n, const char *type, Oid value)
{
	for (int i = 0; i < n; i++)
		if (labels[i] == value)
			return i;
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("unknown value of type %s", type),
			 errdetail("It is none of the extension's, or the extension was dropped and created anew while the statement ran."),
			 errhint("Run the statement again.")));
	return -1;					/* not reached */
}

IdemStatus
idem_status_of(const IdemTable *table, Oid value)
{
	return (IdemStatus) label_of(table->status, IDEM_NSTATUS, "idem_status", value);
}

IdemDisposition
idem_disposition_of(const IdemTable *table, Oid value)
{
	return (IdemDisposition) label_of(table->disposition, IDEM_NDISPOSITION, "idem_disposition", value);
}
