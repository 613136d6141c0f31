/*-------------------------------------------------------------------------
 *
 * levels.c
 *	  State of a transaction that a subtransaction's rollback takes back.
 *
 * A subtransaction that is about to change the state keeps a copy of it first,
 * once; one that changes nothing costs nothing, nor does a transaction without
 * any.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/memutils.h"

#include "levels.h"

typedef struct IdemSavedState
{
	int			nest;			/* of the subtransaction; 2 is the outermost */
	struct IdemSavedState *parent;
	char		before[FLEXIBLE_ARRAY_MEMBER];
} IdemSavedState;

/* Before each change. */
void
idem_levels_save(IdemLevels *levels)
{
	int			nest = GetCurrentTransactionNestLevel();
	IdemSavedState *new;

	if (nest == 1 || (levels->saved != NULL && levels->saved->nest == nest))
		return;
	new = MemoryContextAlloc(TopTransactionContext,
							 offsetof(IdemSavedState, before) + levels->size);
	new->nest = nest;
	new->parent = levels->saved;
	memcpy(new->before, levels->state, levels->size);
	levels->saved = new;
}

/* At each event of a subtransaction. */
void
idem_levels_leave(IdemLevels *levels, SubXactEvent event)
{
	IdemSavedState *ended = levels->saved;

	if (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB)
		return;
	if (ended == NULL || ended->nest < GetCurrentTransactionNestLevel())
		return;

	if (event == SUBXACT_EVENT_ABORT_SUB)
		memcpy(levels->state, ended->before, levels->size);
	else if (ended->nest > 2 && (ended->parent == NULL || ended->parent->nest < ended->nest - 1))
	{
		ended->nest--;			/* the parent had changed nothing before it */
		return;
	}
	levels->saved = ended->parent;
	pfree(ended);
}

/* At the end of the transaction. */
void
idem_levels_end(IdemLevels *levels)
{
	levels->saved = NULL;
	memset(levels->state, 0, levels->size);
}
