/*-------------------------------------------------------------------------
 *
 * xact.c
 *	  What the current transaction has done to keys, for when it ends.
 *
 * A claim that outlives its transaction must be on disk before its owner calls
 * out, and a result before its caller hears of it, whatever synchronous_commit
 * says.  A claim settled in its own transaction need not be: it is lost
 * together with the work or not at all.  So we count the claims that this
 * transaction has made and not settled, and note whether it changed one that
 * was there before; either makes the commit a synchronous one.
 *
 * What a subtransaction did counts only if it commits (levels.c).
 *
 * Whatever became of it, those who wait for one of the keys it has touched are
 * woken when it has ended.  Callbacks run when a commit or abort is there for
 * everybody to see, so who is woken sees it too.  The touched keys are noted
 * as slots of waiters.c; that a wake-up may be for nothing does no harm.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "port/pg_bitutils.h"
#include "utils/memutils.h"

#include "levels.h"
#include "settings.h"
#include "waiters.h"
#include "xact.h"

typedef struct Duties
{
	int64		open_claims;	/* made here less settled here */
	bool		must_flush;
} Duties;

static Duties duties;
static IdemLevels levels = {&duties, sizeof(duties)};

/* A claim this transaction has made, also one it has rolled back since. */
typedef struct OwnClaim
{
	int64		token;
	uint64		key;			/* hash, as in the key lock */
} OwnClaim;

static OwnClaim *claims = NULL; /* rising; in TopTransactionContext */
static int	nclaims = 0;
static int	maxclaims = 0;

/* A bit for each slot of waiters. */
#define TOUCHED_WORDS (IDEM_WAIT_SLOTS / 64)
static uint64 touched[TOUCHED_WORDS];
static bool any_touched = false;

/* To be changed by who calls. */
static Duties *
current_duties(void)
{
	idem_levels_save(&levels);
	return &duties;
}

static int
compare_claims(const void *a, const void *b)
{
	const OwnClaim *ca = (const OwnClaim *) a;
	const OwnClaim *cb = (const OwnClaim *) b;

	if (ca->token != cb->token)
		return ca->token < cb->token ? -1 : 1;
	return ca->key < cb->key ? -1 : ca->key > cb->key;
}

void
idem_xact_claimed(const IdemStore *store, int64 token)
{
	OwnClaim	claim = {token, store->hash};
	int			i;

	if (claims == NULL)
	{
		maxclaims = 8;
		claims = MemoryContextAlloc(TopTransactionContext, maxclaims * sizeof(OwnClaim));
	}
	else if (nclaims == maxclaims)
	{
		claims = repalloc_huge(claims, maxclaims * 2 * sizeof(OwnClaim));
		maxclaims *= 2;
	}

	/* Tokens are drawn from a sequence, so it nearly always goes to the end. */
	for (i = nclaims; i > 0 && compare_claims(&claims[i - 1], &claim) > 0; i--)
		claims[i] = claims[i - 1];
	claims[i] = claim;
	nclaims++;

	current_duties()->open_claims++;
}

/*
 * Was the current version's claim made in this transaction?  One that was
 * rolled back to a savepoint is in the list too, but its row is gone.
 */
bool
idem_xact_is_own_claim(const IdemStore *store)
{
	OwnClaim	claim;

	if (!store->current.own || nclaims == 0)
		return false;
	claim.token = DatumGetInt64(idem_value(&store->current, IDEM_COL_TOKEN));
	claim.key = store->hash;
	return bsearch(&claim, claims, nclaims, sizeof(OwnClaim), compare_claims) != NULL;
}

void
idem_xact_settled(bool own_claim)
{
	if (own_claim)
		current_duties()->open_claims--;
	else
		current_duties()->must_flush = true;
}

/* Something that others rely on was changed, and no claim settled. */
void
idem_xact_changed(void)
{
	current_duties()->must_flush = true;
}

/* The current key's row has been written, and the key is still locked. */
void
idem_xact_touched(IdemStore *store)
{
	int			slot;

	if (!idem_waiters_are_woken())
		return;
	slot = idem_waiters_slot(idem_key_hash(store));
	idem_count_write(slot);
	touched[slot / 64] |= UINT64CONST(1) << (slot % 64);
	any_touched = true;
}

static void
wake_waiters(void)
{
	for (int i = 0; i < TOUCHED_WORDS; i++)
		for (uint64 word = touched[i]; word != 0; word &= word - 1)
			idem_waiters_wake(i * 64 + pg_rightmost_one_pos64(word));
}

static void
at_transaction(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
			if (idem_durable && (duties.must_flush || duties.open_claims > 0))
				ForceSyncCommit();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:	/* which always is flushed */
			idem_levels_end(&levels);
			claims = NULL;
			nclaims = 0;
			if (any_touched)
			{
				wake_waiters();
				memset(touched, 0, sizeof(touched));
				any_touched = false;
			}
			break;
		default:
			break;
	}
}

static void
at_subtransaction(SubXactEvent event, SubTransactionId mySubid,
				  SubTransactionId parentSubid, void *arg)
{
	/* A claim rolled back to a savepoint is free at once. */
	if (event == SUBXACT_EVENT_ABORT_SUB && any_touched)
		wake_waiters();

	idem_levels_leave(&levels, event);
}

void
idem_xact_init(void)
{
	RegisterXactCallback(at_transaction, NULL);
	RegisterSubXactCallback(at_subtransaction, NULL);
}

/* Does the error tell of the server's state rather than of the request? */
bool
idem_is_transient(int sqlstate)
{
	switch (ERRCODE_TO_CATEGORY(sqlstate))
	{
		case ERRCODE_CONNECTION_EXCEPTION:
		case ERRCODE_TRANSACTION_ROLLBACK:
		case ERRCODE_INSUFFICIENT_RESOURCES:
		case ERRCODE_OPERATOR_INTERVENTION:
		case ERRCODE_SYSTEM_ERROR:
		case ERRCODE_INTERNAL_ERROR:
			return true;
		default:
			return sqlstate == ERRCODE_LOCK_NOT_AVAILABLE;
	}
}
