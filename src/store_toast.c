/*-------------------------------------------------------------------------
 *
 * store_toast.c
 *	  Fetching a long value without touching the TOAST table's pages.
 *
 * The server's own way leads through an index fetch that prunes the page it
 * comes by, which is WAL, and a replay writes none.  The chunks of a value are
 * made by one transaction, never updated, and their value's id is not given to
 * another while any of them is there; so they are read as they stand.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/genam.h"
#include "access/heaptoast.h"
#include "access/htup_details.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "storage/bufmgr.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "store.h"

/* Columns of a TOAST table. */
#define CHUNK_ID	1
#define CHUNK_SEQ	2
#define CHUNK_DATA	3

/* The value being put together. */
typedef struct LongValue
{
	Oid			id;
	Size		size;
	Size		found;
	char	   *data;
} LongValue;

static void
missing_chunk(const LongValue *value, Relation rel)
{
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("missing or unexpected chunk of TOAST value %u in \"%s\"", value->id,
					RelationGetRelationName(rel))));
}

static void
copy_chunk(LongValue *value, Relation rel, HeapTuple tuple)
{
	TupleDesc	desc = RelationGetDescr(rel);
	bool		isnull;
	Oid			id = DatumGetObjectId(heap_getattr(tuple, CHUNK_ID, desc, &isnull));
	int32		seq = DatumGetInt32(heap_getattr(tuple, CHUNK_SEQ, desc, &isnull));
	struct varlena *chunk = (struct varlena *)
		DatumGetPointer(heap_getattr(tuple, CHUNK_DATA, desc, &isnull));
	Size		start = (Size) seq * TOAST_MAX_CHUNK_SIZE;
	Size		len;

	if (id != value->id)
		return;					/* see is_our_key() in store_read.c */
	if (VARATT_IS_EXTERNAL(chunk) || VARATT_IS_COMPRESSED(chunk))
		missing_chunk(value, rel);
	len = VARSIZE_ANY_EXHDR(chunk);
	if (seq < 0 || start + len > value->size)
		missing_chunk(value, rel);
	memcpy(value->data + start, VARDATA_ANY(chunk), len);
	value->found += len;
}

static void
read_chunk(LongValue *value, Relation rel, ItemPointer tid)
{
	Buffer		buffer = ReadBuffer(rel, ItemPointerGetBlockNumber(tid));
	Page		page;
	ItemId		item;

	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	page = BufferGetPage(buffer);
	item = PageGetItemId(page, ItemPointerGetOffsetNumber(tid));
	if (ItemIdIsNormal(item))
	{
		HeapTupleData tuple;

		tuple.t_data = (HeapTupleHeader) PageGetItem(page, item);
		tuple.t_len = ItemIdGetLength(item);
		tuple.t_self = *tid;
		tuple.t_tableOid = RelationGetRelid(rel);
		copy_chunk(value, rel, &tuple);
	}
	UnlockReleaseBuffer(buffer);
}

/* The index that is in use; REINDEX CONCURRENTLY has another one for a while. */
static Relation
open_valid_index(Relation rel)
{
	ListCell   *lc;

	foreach(lc, RelationGetIndexList(rel))
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);

		if (index->rd_index->indisvalid)
			return index;
		index_close(index, AccessShareLock);
	}
	elog(ERROR, "no valid index on TOAST table \"%s\"", RelationGetRelationName(rel));
}

static void
read_chunks(LongValue *value, Relation rel)
{
	Relation	index = open_valid_index(rel);
	IndexScanDesc scan;
	ScanKeyData key;
	ItemPointer tid;

	ScanKeyInit(&key, CHUNK_ID, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(value->id));
	scan = idem_index_beginscan(rel, index, SnapshotAny, 1);
	index_rescan(scan, &key, 1, NULL, 0);
	while ((tid = index_getnext_tid(scan, ForwardScanDirection)) != NULL)
		read_chunk(value, rel, tid);
	index_endscan(scan);
	index_close(index, AccessShareLock);
	if (value->found != value->size)
		missing_chunk(value, rel);
}

/*
 * The value itself where the row has only a pointer to it; it may still be
 * compressed.
 */
Datum
idem_fetch_long(Datum datum)
{
	struct varlena *pointer = (struct varlena *) DatumGetPointer(datum);
	struct varatt_external toast;
	struct varlena *result;
	LongValue	value;
	Relation	rel;

	if (!VARATT_IS_EXTERNAL_ONDISK(pointer))
		return datum;

	VARATT_EXTERNAL_GET_POINTER(toast, pointer);
	value.id = toast.va_valueid;
	value.size = VARATT_EXTERNAL_GET_EXTSIZE(toast);
	value.found = 0;
	result = palloc(value.size + VARHDRSZ);
	if (VARATT_EXTERNAL_IS_COMPRESSED(toast))
		SET_VARSIZE_COMPRESSED(result, value.size + VARHDRSZ);
	else
		SET_VARSIZE(result, value.size + VARHDRSZ);
	value.data = VARDATA(result);

	rel = table_open(toast.va_toastrelid, AccessShareLock);
	read_chunks(&value, rel);
	table_close(rel, AccessShareLock);
	return PointerGetDatum(result);
}
