/*-------------------------------------------------------------------------
 *
 * xact.c
 *	  What the current transaction has done to keys, for its commit.
 *
 * A claim that outlives its transaction must be on disk before its owner calls
 * out, and a result before its caller hears of it, whatever synchronous_commit
 * says.  A claim settled in its own transaction need not be: it is lost
 * together with the work or not at all.  So we count the claims that this
 * transaction has made and not settled, and note whether it changed one that
 * was there before; either makes the commit a synchronous one.
 *
 * What a subtransaction did counts only if it commits, hence a level each.  A
 * level exists only once something happened in it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/memutils.h"

#include "settings.h"
#include "xact.h"

typedef struct Level
{
	int			nest;			/* transaction nest level, 1 at the top */
	int64		open_claims;	/* made here less settled here */
	bool		must_flush;
	struct Level *parent;
} Level;

static Level *level = NULL;		/* in TopTransactionContext */

/* The first token this transaction drew; 0 = none yet. */
static int64 first_token = 0;

static Level *
current_level(void)
{
	int			nest = GetCurrentTransactionNestLevel();

	if (level == NULL || level->nest < nest)
	{
		Level	   *new = MemoryContextAllocZero(TopTransactionContext, sizeof(Level));

		new->nest = nest;
		new->parent = level;
		level = new;
	}
	return level;
}

void
idem_xact_claimed(int64 token)
{
	if (first_token == 0)
		first_token = token;
	current_level()->open_claims++;
}

/*
 * Was this claim made in this transaction?  Then the transaction wrote the
 * version, and its token is not older than the first one drawn here.
 */
bool
idem_xact_is_own_claim(const IdemVersion *version)
{
	return version->own && first_token != 0 &&
		DatumGetInt64(idem_value(version, IDEM_COL_TOKEN)) >= first_token;
}

void
idem_xact_settled(bool own_claim)
{
	if (own_claim)
		current_level()->open_claims--;
	else
		current_level()->must_flush = true;
}

/* Something that others rely on was changed, and no claim settled. */
void
idem_xact_changed(void)
{
	current_level()->must_flush = true;
}

static void
at_transaction(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
			if (idem_durable && level != NULL && (level->must_flush || level->open_claims > 0))
				ForceSyncCommit();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:	/* which always is flushed */
			level = NULL;
			first_token = 0;
			break;
		default:
			break;
	}
}

static void
at_subtransaction(SubXactEvent event, SubTransactionId mySubid,
				  SubTransactionId parentSubid, void *arg)
{
	Level	   *ended = level;

	if (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB)
		return;
	if (ended == NULL || ended->nest < GetCurrentTransactionNestLevel())
		return;

	if (event == SUBXACT_EVENT_ABORT_SUB)
		level = ended->parent;
	else if (ended->parent == NULL || ended->parent->nest < ended->nest - 1)
		ended->nest--;			/* becomes what its parent did */
	else
	{
		ended->parent->open_claims += ended->open_claims;
		ended->parent->must_flush |= ended->must_flush;
		level = ended->parent;
		pfree(ended);
	}
}

void
idem_xact_init(void)
{
	RegisterXactCallback(at_transaction, NULL);
	RegisterSubXactCallback(at_subtransaction, NULL);
}
