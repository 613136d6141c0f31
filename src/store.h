/*-------------------------------------------------------------------------
 *
 * store.h
 *	  One key in idempotency_keys: look at it, lock it, write it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_STORE_H
#define IDEM_STORE_H

#include "idempotency.h"

#include "access/tableam.h"
#include "executor/tuptable.h"
#include "nodes/lockoptions.h"
#include "storage/lock.h"
#include "utils/rel.h"

#include "extension.h"

/* One version of a key's row. */
typedef struct IdemVersion
{
	bool		exists;
	bool		own;			/* written by this transaction */
	bool		row_locked;		/* its xmax says something, a row lock at least */
	bool		replaced;		/* updated or deleted by who made it (pending) */
	TransactionId busy;			/* the other, unfinished transaction that made
								 * (pending) or is changing (current) it */
	TupleTableSlot *slot;		/* all columns deformed; kept for the next look */
} IdemVersion;

/*
 * An open table and one key of it; idem_select() turns to another key.  What
 * is needed for every key alike is made once, when it is first needed.
 */
typedef struct IdemStore
{
	IdemKey		name;
	const IdemTable *table;
	Relation	rel;
	Relation	index;
	LOCKMODE	lockmode;
	MemoryContext context;		/* that of idem_open()'s caller */
	struct IndexScanDescData *scan;
	struct IdemWriter *writer;
	bool		foreign_code;	/* may writes run code that isn't ours? */
	uint64		changes;		/* idem_extension_changes() when that was found */
	bool		locked;			/* do we hold the key lock? */
	bool		wrote;			/* have we changed the table? */
	bool		reserved;		/* is the current version's row locked by us? */
	LOCKTAG		tag;
	uint64		hash;			/* of scope and key; 0: not known yet */
	IdemVersion current;		/* committed, or this transaction's */
	IdemVersion pending;		/* made by a transaction that has not ended */
	ItemPointerData next;		/* where the look is to find the version that */
	TransactionId next_xmin;	/* has replaced one; made by this, if valid */
} IdemStore;

#define idem_value(version, column) ((version)->slot->tts_values[(column) - 1])
#define idem_isnull(version, column) ((version)->slot->tts_isnull[(column) - 1])

/* store_read.c */
extern void idem_open(IdemStore *store, const IdemKey *name, LOCKMODE lockmode);
extern bool idem_open_to_sweep(IdemStore *store, LOCKMODE lockmode);
extern void idem_select(IdemStore *store, const IdemKey *name);
extern void idem_close(IdemStore *store);
extern uint64 idem_key_hash(IdemStore *store);
extern void idem_lock_key(IdemStore *store);
extern void idem_unlock_key(IdemStore *store);
extern void idem_look(IdemStore *store);
extern void idem_look_again(IdemStore *store);

/* store_toast.c */
extern Datum idem_fetch_long(Datum datum);

/* store_write.c */
extern void idem_writer_end(IdemStore *store);
extern void idem_prepare_delete(IdemStore *store);
extern bool idem_insert(IdemStore *store, Datum *values, bool *nulls);
extern TM_Result idem_reserve_row(IdemStore *store, LockTupleMode mode);
extern TM_Result idem_update(IdemStore *store, Datum *values, bool *nulls, bool anew);
extern TM_Result idem_delete(IdemStore *store);
extern void idem_await_version(IdemStore *store, IdemVersion *version);
extern void idem_await_row_lock(IdemStore *store, LockTupleMode mode);
extern int64 idem_next_token(const IdemStore *store);

#endif							/* IDEM_STORE_H */
