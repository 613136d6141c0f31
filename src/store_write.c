/*-------------------------------------------------------------------------
 *
 * store_write.c
 *	  Writing one key's row.
 *
 * Straight to the heap and its indexes, without SPI or a plan.  The caller
 * holds the key lock and has looked (a sweep, which only deletes, does without
 * the lock).  An insert, update or delete waits for no transaction, and what
 * happened meanwhile is an answer (TM_Result, or false from an insert), never
 * an error; who wants to wait lets the key lock go and calls
 * idem_await_version or idem_await_row_lock.
 *
 * Indexes, constraints, column defaults and AFTER ROW triggers that somebody
 * added to the table are honoured.  They may be anybody's code, so they run
 * as the table's owner (or as deleter.c says) with a safe search_path (become).
 * What is not the caller's own code, nor a superuser's, may leave nothing behind
 * that would run when the transaction commits, in the caller's name; nor may
 * what is another role's than the owner's, or runs in a sweep, which comes without
 * anybody's asking.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/catalog.h"
#include "commands/sequence.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "rewrite/rewriteHandler.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "deleter.h"
#include "store.h"
#include "xact.h"

/* What writes need of the executor, and the caller's identity during one. */
typedef struct IdemWriter
{
	EState	   *estate;
	ResultRelInfo *rri;
	TupleTableSlot *slot;		/* the new row */
	Oid			save_userid;
	int			save_sec_context;
	int			save_nestlevel;
	bool		became;			/* what begin_write() did, for end_write() */
	bool		triggers;
} IdemWriter;

static bool
is_sweep(const IdemStore *store)
{
	return store->name.key == NULL;
}

static void
become(IdemWriter *w, const IdemStore *store, CmdType operation)
{
	Oid			owner = store->rel->rd_rel->relowner;
	Oid			role = operation == CMD_DELETE ? idem_deleter(store->rel) : owner;
	bool		restricted;

	GetUserIdAndSecContext(&w->save_userid, &w->save_sec_context);
	restricted = is_sweep(store) || role != owner ||
		(role != w->save_userid && !superuser_arg(role));
	SetUserIdAndSecContext(role,
						   w->save_sec_context | SECURITY_LOCAL_USERID_CHANGE |
						   (restricted ? SECURITY_RESTRICTED_OPERATION : 0));
	w->save_nestlevel = NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp",
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
}

static void
become_oneself(IdemWriter *w)
{
	AtEOXact_GUC(false, w->save_nestlevel);
	SetUserIdAndSecContext(w->save_userid, w->save_sec_context);
}

static IdemWriter *
make_writer(IdemStore *store)
{
	MemoryContext old = MemoryContextSwitchTo(store->context);
	IdemWriter *w = palloc0(sizeof(IdemWriter));

	w->estate = CreateExecutorState();
	MemoryContextSwitchTo(w->estate->es_query_cxt);
	w->rri = makeNode(ResultRelInfo);
	InitResultRelInfo(w->rri, store->rel, 0, NULL, 0);
	w->estate->es_opened_result_relations = list_make1(w->rri);
	w->slot = ExecInitExtraTupleSlot(w->estate, RelationGetDescr(store->rel), &TTSOpsVirtual);
	MemoryContextSwitchTo(old);
	return w;
}

/* With the tables, if any, to which triggers of foreign keys have gone on. */
void
idem_writer_end(IdemStore *store)
{
	IdemWriter *w = store->writer;

	ExecCloseResultRelations(w->estate);
	ExecResetTupleTable(w->estate->es_tupleTable, false);
	FreeExecutorState(w->estate);
	pfree(w);
	store->writer = NULL;
}

/*
 * Who refers to the key's row may have to be waited for: where there is a key
 * lock, that is before it is taken.
 */
void
idem_prepare_delete(IdemStore *store)
{
	if (store->foreign_code)
		(void) idem_deleter(store->rel);
}

/*
 * Is there code that isn't ours, or may there be by now?  Our lock on the table
 * doesn't keep CREATE INDEX CONCURRENTLY out, which is nothing to a delete.
 */
static bool
may_run_foreign_code(IdemStore *store, CmdType operation)
{
	if (operation != CMD_DELETE && store->changes != idem_extension_changes())
		store->foreign_code = true;
	return store->foreign_code;
}

/* A delete does without, and need not wait for who has an index locked. */
static void
open_indexes(IdemStore *store)
{
	MemoryContext old;

	if (store->writer->rri->ri_IndexRelationDescs != NULL)
		return;
	old = MemoryContextSwitchTo(store->writer->estate->es_query_cxt);
	ExecOpenIndices(store->writer->rri, false);
	MemoryContextSwitchTo(old);
}

static IdemWriter *
begin_write(IdemStore *store, CmdType operation)
{
	IdemWriter *w;

	if (store->writer == NULL)
		store->writer = make_writer(store);
	w = store->writer;

	/* The look has seen what this very statement wrote, so we may change it. */
	CommandCounterIncrement();
	w->estate->es_output_cid = GetCurrentCommandId(true);
	w->became = may_run_foreign_code(store, operation);
	if (w->became)
		become(w, store, operation);
	w->triggers = store->rel->trigdesc != NULL;
	if (w->triggers)
		AfterTriggerBeginQuery();
	return w;
}

static void
end_write(IdemStore *store, bool done)
{
	IdemWriter *w = store->writer;

	if (done)
	{
		store->wrote = true;
		if (!is_sweep(store))	/* nobody waits for what is swept */
			idem_xact_touched(store);
	}
	if (w->triggers)
	{
		/* Triggers may take their time, and locks; not under the key's. */
		if (done)
			idem_unlock_key(store);
		AfterTriggerEndQuery(w->estate);
	}
	ExecClearTuple(w->slot);
	ResetPerTupleExprContext(w->estate);
	if (w->became)
		become_oneself(w);

	/* What follows in this statement may see, and change, what we wrote. */
	CommandCounterIncrement();
}

/* Columns somebody added to the table get their default. */
static void
fill_added_columns(IdemWriter *w, Relation rel, Datum *values, bool *nulls)
{
	TupleDesc	desc = RelationGetDescr(rel);

	for (int i = IDEM_NCOLUMNS; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		Node	   *expr;

		values[i] = (Datum) 0;
		nulls[i] = true;
		if (att->attisdropped)
			continue;
		expr = build_column_default(rel, att->attnum);
		if (expr != NULL)
			values[i] = ExecEvalExpr(ExecPrepareExpr((Expr *) expr, w->estate),
									 GetPerTupleExprContext(w->estate), &nulls[i]);
	}
}

static TupleTableSlot *
make_row(IdemWriter *w, IdemStore *store, Datum *values, bool *nulls)
{
	TupleDesc	desc = RelationGetDescr(store->rel);
	TupleTableSlot *slot = w->slot;

	memcpy(slot->tts_values, values, desc->natts * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, desc->natts * sizeof(bool));
	ExecStoreVirtualTuple(slot);
	slot->tts_tableOid = RelationGetRelid(store->rel);
	if (desc->constr != NULL)
		ExecConstraints(w->rri, slot, w->estate);
	return slot;
}

/*
 * INSERT ... ON CONFLICT (scope, key) DO NOTHING.  False if there is a row
 * after all, which only somebody who doesn't take the key lock can have made.
 */
bool
idem_insert(IdemStore *store, Datum *values, bool *nulls)
{
	IdemWriter *w = begin_write(store, CMD_INSERT);
	TupleTableSlot *slot;
	List	   *recheck = NIL;
	bool		conflict = false;

	open_indexes(store);
	fill_added_columns(w, store->rel, values, nulls);
	slot = make_row(w, store, values, nulls);
	store->wrote = true;
	table_tuple_insert(store->rel, slot, w->estate->es_output_cid, 0, NULL);
	recheck = idem_insert_index_tuples(w->rri, slot, w->estate, false, true, &conflict,
									   list_make1_oid(store->table->pkey), IDEM_ALL_INDEXES);
	if (conflict)
	{
		CommandCounterIncrement();
		simple_heap_delete(store->rel, &slot->tts_tid);
	}
	else if (store->rel->trigdesc != NULL)
		ExecARInsertTriggers(w->estate, w->rri, slot, recheck, NULL);
	end_write(store, !conflict);
	return !conflict;
}

/*
 * Locks the current version's row.  A lock of our own, or one that does not
 * conflict (a foreign key's KEY SHARE and an update), is no obstacle here,
 * while to an update or delete that must not wait any lock at all is one.
 */
static TM_Result
lock_row(IdemStore *store, LockTupleMode mode, LockWaitPolicy policy)
{
	TupleTableSlot *slot = table_slot_create(store->rel, NULL);
	TM_FailureData failure;
	TM_Result	result;

	CommandCounterIncrement();	/* as in begin_write() */
	result = table_tuple_lock(store->rel, &store->current.slot->tts_tid, SnapshotAny, slot,
							  GetCurrentCommandId(true), mode, policy, 0, &failure);
	ExecDropSingleTupleTableSlot(slot);
	store->wrote |= result == TM_Ok;
	return result == TM_WouldBlock ? TM_BeingModified : result;
}

/*
 * Makes sure that no row lock is in the way of a write to the current version,
 * which then may "wait" without doing so.  Where the look saw no lock there is
 * nothing to do, since taking one is a WAL record; should one come in between,
 * the write, which must not wait then, says so.  (Servers with assertions don't
 * allow for that answer of heap_update, and take the lock always.)
 */
TM_Result
idem_reserve_row(IdemStore *store, LockTupleMode mode)
{
	TM_Result	result = TM_Ok;
	bool		needed = store->current.row_locked;

#ifdef USE_ASSERT_CHECKING
	needed = true;
#endif
	store->reserved = false;
	if (needed)
	{
		result = lock_row(store, mode, LockWaitSkip);
		store->reserved = result == TM_Ok;
	}
	return result;
}

/*
 * Replaces the current version; TM_BeingModified if another's row lock forbids.
 * Anew: the key counted as absent, so the row is to be as an insert's.
 */
TM_Result
idem_update(IdemStore *store, Datum *values, bool *nulls, bool anew)
{
	ItemPointerData tid = store->current.slot->tts_tid;
	IdemWriter *w;
	TupleTableSlot *slot;
	IdemUpdateIndexes indexes = IDEM_NO_INDEXES;
	TM_FailureData failure;
	LockTupleMode lockmode;
	TM_Result	result = idem_reserve_row(store, LockTupleNoKeyExclusive);

	if (result != TM_Ok)
		return result;

	w = begin_write(store, CMD_UPDATE);
	CheckCmdReplicaIdentity(store->rel, CMD_UPDATE);
	open_indexes(store);
	if (anew)
		fill_added_columns(w, store->rel, values, nulls);
	slot = make_row(w, store, values, nulls);
	result = table_tuple_update(store->rel, &tid, slot, w->estate->es_output_cid,
								InvalidSnapshot, InvalidSnapshot, store->reserved,
								&failure, &lockmode, &indexes);
	if (result == TM_SelfModified)
		ereport(ERROR,
				(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
				 errmsg("the row of idempotency key \"%s\" was changed by code that its own change runs",
						text_to_cstring(store->name.key)),
				 errhint("Let no default and no CHECK of table \"%s\" change keys.", IDEM_TABLE)));
	if (result == TM_Ok)
	{
		List	   *recheck = NIL;

		if (indexes != IDEM_NO_INDEXES)
			recheck = idem_insert_index_tuples(w->rri, slot, w->estate, true, false, NULL, NIL,
											   indexes);
		if (store->rel->trigdesc != NULL)
			idem_after_update_triggers(w->estate, w->rri, &tid, slot, recheck);
	}
	end_write(store, result == TM_Ok);
	return result;
}

/* Deletes the current version; TM_BeingModified if another's row lock forbids. */
TM_Result
idem_delete(IdemStore *store)
{
	ItemPointerData tid = store->current.slot->tts_tid;
	IdemWriter *w;
	TM_FailureData failure;
	TM_Result	result = idem_reserve_row(store, LockTupleExclusive);

	if (result != TM_Ok)
		return result;

	/* Else heap_delete() asks for it, and may wait for an index, in the page's lock. */
	if (RelationIsLogicallyLogged(store->rel))
		bms_free(RelationGetIndexAttrBitmap(store->rel, INDEX_ATTR_BITMAP_IDENTITY_KEY));

	w = begin_write(store, CMD_DELETE);
	CheckCmdReplicaIdentity(store->rel, CMD_DELETE);
	result = table_tuple_delete(store->rel, &tid, w->estate->es_output_cid,
								InvalidSnapshot, InvalidSnapshot, store->reserved,
								&failure, false);
	if (result == TM_Ok && store->rel->trigdesc != NULL)
		idem_after_delete_triggers(w->estate, w->rri, &tid);
	end_write(store, result == TM_Ok);
	return result;
}

/*
 * Waits for the transaction that is changing a version, as an UPDATE would,
 * visible to the deadlock detector; without the key lock.
 */
void
idem_await_version(IdemStore *store, IdemVersion *version)
{
	idem_unlock_key(store);
	XactLockTableWait(version->busy, store->rel, &version->slot->tts_tid, XLTW_Update);
}

/*
 * The same for somebody's row lock (SELECT ... FOR UPDATE), of which there may
 * be several at once: stand in line for the row, which the lock manager knows
 * how to do.  The lock we get is ours when we come back to write.
 */
void
idem_await_row_lock(IdemStore *store, LockTupleMode mode)
{
	idem_unlock_key(store);
	(void) lock_row(store, mode, LockWaitBlock);
}

/*
 * A fencing token above every earlier one of the key: the sequence sees to
 * that, and the row itself where somebody has set the sequence back.
 */
int64
idem_next_token(const IdemStore *store)
{
	int64		token = nextval_internal(store->table->sequence, false);

	if (store->current.exists)
	{
		int64		old = DatumGetInt64(idem_value(&store->current, IDEM_COL_TOKEN));

		if (token <= old)
			token = old + 1;
	}
	return token;
}
