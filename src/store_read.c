/*-------------------------------------------------------------------------
 *
 * store_read.c
 *	  Looking at a key, and the key lock.
 *
 * A look goes through the primary key's index and judges each version of the
 * row by the state of the transactions in its header.  No snapshot comes into
 * it: a rival's uncommitted version is seen without waiting for it, the answer
 * is the table as it is now at every isolation level, and no predicate lock is
 * taken.  The versions are fetched as SnapshotAny does it, because the
 * snapshots that judge by themselves set hint bits, and the usual fetch prunes
 * the page on its way; a look without the key lock writes nothing whatever.
 *
 * A scan takes time, and the row may move meanwhile, behind it.  So a look that
 * comes to an end without the newest version goes on from the old one.
 *
 * The key lock is held from the look to the write that follows it, by all who
 * make a version of a key's row.  What a look without it says was so during the
 * look, and must not be acted on.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "access/transam.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_collation.h"
#include "common/hashfn.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/procarray.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "state.h"
#include "store.h"

/* SQL's advisory locks bear 1 or 2 here. */
#define IDEM_LOCK_SPACE 478

typedef enum VersionState
{
	VERSION_DEAD,				/* never was, or is no more */
	VERSION_CURRENT,
	VERSION_PENDING
} VersionState;

static void
begin(IdemStore *store, LOCKMODE lockmode)
{
	memset(store, 0, sizeof(*store));
	store->lockmode = lockmode;
	store->context = CurrentMemoryContext;
}

static bool
open_table(IdemStore *store, bool wait)
{
	store->table = idem_open_table(store->lockmode, wait, &store->rel);
	if (store->table == NULL)
		return false;
	store->foreign_code = store->table->foreign_code;
	store->changes = idem_extension_changes();
	return true;
}

void
idem_open(IdemStore *store, const IdemKey *name, LOCKMODE lockmode)
{
	begin(store, lockmode);
	store->name = *name;
	(void) open_table(store, true);
	store->index = index_open(store->table->pkey, lockmode);
}

/* For no key in particular; false if somebody has the table locked. */
bool
idem_open_to_sweep(IdemStore *store, LOCKMODE lockmode)
{
	begin(store, lockmode);
	return open_table(store, false);
}

static void
forget_version(IdemVersion *version)
{
	TupleTableSlot *slot = version->slot;

	if (slot != NULL)
		ExecClearTuple(slot);
	memset(version, 0, sizeof(*version));
	version->slot = slot;
}

/* Turns to another key. */
void
idem_select(IdemStore *store, const IdemKey *name)
{
	idem_unlock_key(store);
	forget_version(&store->current);
	forget_version(&store->pending);
	store->name = *name;
	store->hash = 0;
}

static void
drop_slot(IdemVersion *version)
{
	if (version->slot != NULL)
		ExecDropSingleTupleTableSlot(version->slot);
	memset(version, 0, sizeof(*version));
}

/*
 * Whoever has only looked lets the relation's lock go, so that who waits holds
 * none; a writer's is kept to the end of the transaction, as for any DML.
 */
void
idem_close(IdemStore *store)
{
	LOCKMODE	release = store->wrote ? NoLock : store->lockmode;

	idem_unlock_key(store);
	drop_slot(&store->current);
	drop_slot(&store->pending);
	if (store->writer != NULL)
		idem_writer_end(store);
	if (store->scan != NULL)
		index_endscan(store->scan);
	if (store->index != NULL)
		index_close(store->index, release);
	table_close(store->rel, release);
}

/* Never 0. */
uint64
idem_key_hash(IdemStore *store)
{
	const IdemKey *name = &store->name;

	if (store->hash == 0)
	{
		uint64		hash;

		hash = hash_bytes_extended((const unsigned char *) VARDATA_ANY(name->scope),
								   VARSIZE_ANY_EXHDR(name->scope), 0);
		hash = hash_bytes_extended((const unsigned char *) VARDATA_ANY(name->key),
								   VARSIZE_ANY_EXHDR(name->key), hash);
		store->hash = hash != 0 ? hash : 1;
	}
	return store->hash;
}

void
idem_lock_key(IdemStore *store)
{
	uint64		hash = idem_key_hash(store);

	SET_LOCKTAG_ADVISORY(store->tag, MyDatabaseId, (uint32) (hash >> 32), (uint32) hash,
						 IDEM_LOCK_SPACE);
	(void) LockAcquire(&store->tag, ExclusiveLock, false, false);
	store->locked = true;
}

void
idem_unlock_key(IdemStore *store)
{
	if (!store->locked)
		return;
	LockRelease(&store->tag, ExclusiveLock, false);
	store->locked = false;
}

/*
 * Is it our key's row at all?  On a primary the scan's pin on the index page
 * keeps VACUUM from giving the place of a dead row to another one; replay on a
 * standby does not wait for pins of scans without an MVCC snapshot.  A scan that
 * was begun there may end after the promotion.
 */
static bool
is_our_key(IdemStore *store, HeapTuple tuple)
{
	TupleDesc	desc = RelationGetDescr(store->rel);
	bool		isnull;
	Datum		scope = heap_getattr(tuple, IDEM_COL_SCOPE, desc, &isnull);
	Datum		key = heap_getattr(tuple, IDEM_COL_KEY, desc, &isnull);

	return idem_same_bytes(DatumGetTextPP(scope), store->name.scope) &&
		idem_same_bytes(DatumGetTextPP(key), store->name.key);
}

/*
 * What HeapTupleSatisfiesDirty tells, without the hint bits it sets: is it our
 * own, which unfinished transaction stands behind it, and which other one has
 * updated or deleted it, finished or not.  The order of the questions is its
 * too: current, in progress, committed; a transaction is in progress until after
 * its commit is on record.
 */
static VersionState
judge_version(HeapTupleHeader header, bool *own, TransactionId *busy, TransactionId *replacer)
{
	VersionState state = VERSION_CURRENT;
	TransactionId xid;

	*own = false;
	*busy = InvalidTransactionId;
	*replacer = InvalidTransactionId;

	if (!HeapTupleHeaderXminCommitted(header))
	{
		if (HeapTupleHeaderXminInvalid(header))
			return VERSION_DEAD;
		xid = HeapTupleHeaderGetRawXmin(header);
		if (TransactionIdIsCurrentTransactionId(xid))
			*own = true;
		else if (TransactionIdIsInProgress(xid))
		{
			state = VERSION_PENDING;
			*busy = xid;
		}
		else if (!TransactionIdDidCommit(xid))
			return VERSION_DEAD;
	}

	if ((header->t_infomask & HEAP_XMAX_INVALID) ||
		HEAP_XMAX_IS_LOCKED_ONLY(header->t_infomask))
		return state;

	xid = HeapTupleHeaderGetUpdateXid(header);
	if (TransactionIdIsCurrentTransactionId(xid))
		return VERSION_DEAD;
	if (TransactionIdIsInProgress(xid))
		*busy = *replacer = xid;
	else if (TransactionIdDidCommit(xid))
	{
		*replacer = xid;
		return VERSION_DEAD;
	}
	return state;
}

static void
keep_version(IdemStore *store, IdemVersion *version, HeapTuple tuple, Buffer buffer)
{
	BufferHeapTupleTableSlot *slot;

	if (version->slot == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(store->context);

		version->slot = MakeSingleTupleTableSlot(RelationGetDescr(store->rel),
												 &TTSOpsBufferHeapTuple);
		MemoryContextSwitchTo(old);
	}
	slot = (BufferHeapTupleTableSlot *) version->slot;
	slot->base.tupdata = *tuple;
	ExecStoreBufferHeapTuple(&slot->base.tupdata, version->slot, buffer);
	version->exists = true;
}

/*
 * Was the transaction still to end when the statement that looks began?  What it
 * has replaced since, and whatever came after that, no vacuum removes.
 */
static bool
is_recent(TransactionId xid)
{
	return ActiveSnapshotSet() && XidInMVCCSnapshot(xid, GetActiveSnapshot());
}

/*
 * Keeps in mind where the version's successor is, unless this is it at last: of
 * the current version's, or if there is none, of one that died during the look.
 */
static void
note_successor(IdemStore *store, HeapTuple tuple, VersionState state, TransactionId replacer)
{
	if (TransactionIdIsValid(store->next_xmin) &&
		ItemPointerEquals(&store->next, &tuple->t_self))
		store->next_xmin = InvalidTransactionId;

	if (!TransactionIdIsValid(replacer) ||
		ItemPointerEquals(&tuple->t_data->t_ctid, &tuple->t_self))
		return;
	if (state == VERSION_DEAD && (store->current.exists || !is_recent(replacer)))
		return;
	store->next = tuple->t_data->t_ctid;
	store->next_xmin = replacer;
}

/* Takes in a version by its state; true when nothing newer can follow. */
static bool
take_version(IdemStore *store, HeapTuple tuple, Buffer buffer)
{
	bool		own;
	TransactionId busy;
	TransactionId replacer;
	VersionState state = judge_version(tuple->t_data, &own, &busy, &replacer);

	note_successor(store, tuple, state, replacer);
	switch (state)
	{
		case VERSION_DEAD:
			break;
		case VERSION_CURRENT:
			keep_version(store, &store->current, tuple, buffer);
			store->current.own = own;
			store->current.busy = busy;
			store->current.row_locked = !(tuple->t_data->t_infomask & HEAP_XMAX_INVALID);
			return !TransactionIdIsValid(busy);
		case VERSION_PENDING:

			/*
			 * Of several versions made by one open transaction the last
			 * counts.  One that it has deleted again is better than none: it
			 * still is in an insert's way.
			 */
			if (store->pending.exists && TransactionIdIsValid(replacer))
				break;
			keep_version(store, &store->pending, tuple, buffer);
			store->pending.busy = busy;
			store->pending.replaced = TransactionIdIsValid(replacer);
			break;
	}
	return false;
}

/* Takes in the versions of one HOT chain; true when nothing newer can follow. */
static bool
look_along_chain(IdemStore *store, ItemPointer root)
{
	ItemPointerData tid = *root;
	Buffer		buffer = ReadBuffer(store->rel, ItemPointerGetBlockNumber(root));
	HeapTupleData tuple;
	bool		first = true;
	bool		done = false;

	/* Whoever is about to write tidies the page, as any other scan would. */
	if (store->locked)
		heap_page_prune_opt(store->rel, buffer);

	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	while (!done &&
		   heap_hot_search_buffer(&tid, store->rel, buffer, SnapshotAny, &tuple, NULL, first))
	{
		first = false;
		if (!store->scan->xactStartedInRecovery || is_our_key(store, &tuple))
			done = take_version(store, &tuple, buffer);
	}
	UnlockReleaseBuffer(buffer);
	return done;
}

static bool
get_tuple(Relation rel, Buffer buffer, ItemPointer tid, HeapTuple tuple)
{
	Page		page = BufferGetPage(buffer);
	OffsetNumber offset = ItemPointerGetOffsetNumber(tid);
	ItemId		item;

	if (offset < FirstOffsetNumber || offset > PageGetMaxOffsetNumber(page))
		return false;
	item = PageGetItemId(page, offset);
	if (!ItemIdIsNormal(item))
		return false;
	tuple->t_tableOid = RelationGetRelid(rel);
	tuple->t_self = *tid;
	tuple->t_data = (HeapTupleHeader) PageGetItem(page, item);
	tuple->t_len = ItemIdGetLength(item);
	return true;
}

static IndexScanDesc
begin_scan(IdemStore *store)
{
	MemoryContext old = MemoryContextSwitchTo(store->context);
	IndexScanDesc scan = idem_index_beginscan(store->rel, store->index, SnapshotAny, 2);

	MemoryContextSwitchTo(old);
	return scan;
}

static void
scan_versions(IdemStore *store)
{
	ScanKeyData keys[2];
	ItemPointer tid;

	forget_version(&store->current);
	forget_version(&store->pending);
	ItemPointerSetInvalid(&store->next);
	store->next_xmin = InvalidTransactionId;

	ScanKeyEntryInitialize(&keys[0], 0, 1, BTEqualStrategyNumber, InvalidOid,
						   C_COLLATION_OID, F_TEXTEQ, PointerGetDatum(store->name.scope));
	ScanKeyEntryInitialize(&keys[1], 0, 2, BTEqualStrategyNumber, InvalidOid,
						   C_COLLATION_OID, F_TEXTEQ, PointerGetDatum(store->name.key));
	if (store->scan == NULL)
		store->scan = begin_scan(store);
	index_rescan(store->scan, keys, 2, NULL, 0);
	while ((tid = index_getnext_tid(store->scan, ForwardScanDirection)) != NULL)
		if (look_along_chain(store, tid))
			break;

	/* Lets go of the index page, which VACUUM may be waiting for. */
	index_rescan(store->scan, NULL, 2, NULL, 0);
}

/* May there be a newer version than those that were found? */
static bool
is_outdated(const IdemStore *store)
{
	if (!TransactionIdIsValid(store->next_xmin))
		return false;
	if (!store->current.exists)
		return true;
	return TransactionIdIsValid(store->current.busy) &&
		(!store->pending.exists || store->pending.replaced);
}

/*
 * Goes on from what the scan has found to the versions it has not: a row that
 * moves to another place gets its new index entry a moment after the new
 * version, and perhaps where the scan has been already.
 */
static void
follow_updates(IdemStore *store)
{
	while (is_outdated(store))
	{
		ItemPointerData tid = store->next;
		TransactionId xmin = store->next_xmin;
		HeapTupleData tuple;
		Buffer		buffer;

		CHECK_FOR_INTERRUPTS();
		store->next_xmin = InvalidTransactionId;

		/* With old_snapshot_threshold a vacuum may have been there after all. */
		if (ItemPointerGetBlockNumber(&tid) >= RelationGetNumberOfBlocks(store->rel))
			break;
		buffer = ReadBuffer(store->rel, ItemPointerGetBlockNumber(&tid));
		LockBuffer(buffer, BUFFER_LOCK_SHARE);
		if (get_tuple(store->rel, buffer, &tid, &tuple) &&
			TransactionIdEquals(HeapTupleHeaderGetRawXmin(tuple.t_data), xmin))
			(void) take_version(store, &tuple, buffer);
		UnlockReleaseBuffer(buffer);
	}
}

/*
 * Looks at the key as it is now and fills in current and pending, either of
 * which may not exist.
 *
 * A scan takes time.  If a transaction ends meanwhile, its new version may
 * have been judged before and its old one after that: no row, then, but a
 * pending version of nobody's, which another scan sees as it has become.
 */
void
idem_look(IdemStore *store)
{
	do
	{
		CHECK_FOR_INTERRUPTS();
		scan_versions(store);
		follow_updates(store);
	} while (!store->current.exists && store->pending.exists &&
			 !TransactionIdIsInProgress(store->pending.busy));

	/* Nobody is changing it: what seemed pending was not to be. */
	if (store->current.exists && !TransactionIdIsValid(store->current.busy))
		forget_version(&store->pending);

	if (store->current.exists)
		slot_getallattrs(store->current.slot);
	if (store->pending.exists)
		slot_getallattrs(store->pending.slot);
}

/*
 * Looks again where nothing was found, before that is acted on: with the key
 * locked.  On a standby nobody else would take the lock, and nobody acts.
 */
void
idem_look_again(IdemStore *store)
{
	if (!RecoveryInProgress())
		idem_lock_key(store);
	idem_look(store);
	idem_unlock_key(store);
}
