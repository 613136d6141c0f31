/*-------------------------------------------------------------------------
 *
 * notice.c
 *	  Tells the launcher in which databases the extension was created.
 *
 * So it need not look into databases that don't have it.  A session notes that
 * it creates an extension in a hook, which does no more than that: whether it
 * is ours is told by a visit, and there is something to see only after the
 * commit, when the launcher is told.  What gets lost (a prepared transaction,
 * a launcher that is just being restarted) is found by its next visit, which
 * comes without notice too, only later.
 *
 * The board is in shared memory; without preload there is none.  Its spinlock
 * guards all of it, and nothing under it can fail.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_extension.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "storage/spin.h"

#include "notice.h"
#include "shared.h"

typedef struct Board
{
	slock_t		mutex;
	int			launcher;		/* its pid, or what it was */
	int			n;				/* more than there is room for: any database */
	Oid			databases[IDEM_NOTICES];
} Board;

static Board *board = NULL;
static object_access_hook_type next_access_hook = NULL;
static bool created = false;	/* in this transaction */

static void
set_up(void *part)
{
	Board	   *new = part;

	SpinLockInit(&new->mutex);
	new->launcher = 0;
	new->n = 0;
}

static void
note_creation(ObjectAccessType access, Oid classId, Oid objectId, int subId, void *arg)
{
	if (next_access_hook != NULL)
		next_access_hook(access, classId, objectId, subId, arg);
	if (access == OAT_POST_CREATE && classId == ExtensionRelationId)
		created = true;
}

static void
wake(int pid)
{
	PGPROC	   *launcher = pid != 0 ? BackendPidGetProc(pid) : NULL;

	if (launcher != NULL)
		SetLatch(&launcher->procLatch);
}

static void
give_notice(void)
{
	int			launcher;
	bool		there = false;

	SpinLockAcquire(&board->mutex);
	for (int i = 0; i < Min(board->n, IDEM_NOTICES); i++)
		there |= board->databases[i] == MyDatabaseId;
	if (!there && board->n <= IDEM_NOTICES)
	{
		if (board->n < IDEM_NOTICES)
			board->databases[board->n] = MyDatabaseId;
		board->n++;
	}
	launcher = board->launcher;
	SpinLockRelease(&board->mutex);
	wake(launcher);
}

static void
at_end(XactEvent event, void *arg)
{
	if (!created)
		return;
	if (event == XACT_EVENT_COMMIT && board != NULL)
		give_notice();
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE)
		created = false;
}

/* While the library is preloaded; before idem_shared_init(). */
void
idem_notice_init(void)
{
	idem_shared_add("idempotency notices", sizeof(Board), set_up, (void **) &board);
	next_access_hook = object_access_hook;
	object_access_hook = note_creation;
	RegisterXactCallback(at_end, NULL);
}

bool
idem_notice_is_given(void)
{
	return board != NULL;
}

/* This process is the launcher; who sets the latch of one that is gone does no harm. */
void
idem_notice_listen(void)
{
	if (board == NULL)
		return;
	SpinLockAcquire(&board->mutex);
	board->launcher = MyProcPid;
	SpinLockRelease(&board->mutex);
}

bool
idem_notice_is_pending(void)
{
	bool		pending;

	if (board == NULL)
		return false;
	SpinLockAcquire(&board->mutex);
	pending = board->n > 0;
	SpinLockRelease(&board->mutex);
	return pending;
}

/* How many databases there are notices of; more than IDEM_NOTICES is any. */
int
idem_notice_take(Oid *databases)
{
	int			n;

	if (board == NULL)
		return 0;
	SpinLockAcquire(&board->mutex);
	n = board->n;
	memcpy(databases, board->databases, Min(n, IDEM_NOTICES) * sizeof(Oid));
	board->n = 0;
	SpinLockRelease(&board->mutex);
	return n;
}
