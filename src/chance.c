/*-------------------------------------------------------------------------
 *
 * chance.c
 *	  What counts in samples say of the whole.
 *
 * Rare things come into a sample by chance, as many as a Poisson distribution
 * has it if each comes by itself; of those that lie together, as many as lie
 * together count as one.  Whether the whole is above a threshold is said only
 * if at the threshold such a count would be one in a million: who looks each
 * minute would else be told so by chance within days.
 *
 * Samples that don't decide by themselves are added up, as cumulative sums
 * (CUSUM) of the logarithm of how much likelier they are if the whole is e times
 * the threshold, or an e-th of it, than if it is at the threshold.  Neither sum
 * falls below zero, so that what has been long ago doesn't weigh against what is
 * now.  At the threshold, such a sum comes to ln(n) once in n samples at most.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "chance.h"

#define RARE 1e-6
#define RARE_DEVIATIONS 4.95	/* the same, of what is nearly a normal distribution */
#define LARGE 500				/* from here on, it is one */

/* Sums that decide: once in a million samples, and in a hundred. */
#define ENOUGH_MORE 13.8
#define ENOUGH_LESS 4.6

/* The probability of less than so many. */
static double
less_than(double n, double expected)
{
	double		term = exp(-expected);
	double		sum = 0;

	for (int i = 0; i < n; i++)
	{
		sum += term;
		term *= expected / (i + 1);
	}
	return sum;
}

bool
idem_surely_more(IdemEvidence evidence)
{
	double		expected = evidence.expected / evidence.clump;
	double		found = floor(evidence.found / evidence.clump);

	if (found <= expected)
		return false;
	if (expected >= LARGE)
		return (found - expected) / sqrt(expected) > RARE_DEVIATIONS;
	return 1 - less_than(found, expected) < RARE;
}

/* One more sample, which may be known to decide. */
IdemVerdict
idem_weigh(IdemTrial *trial, IdemEvidence evidence, bool surely_more)
{
	double		clump = Max(trial->clump, evidence.clump);
	double		weight = trial->clump / clump;
	double		more = evidence.found - (M_E - 1) * evidence.expected;
	double		less = (1 - 1 / M_E) * evidence.expected - evidence.found;

	trial->more = Max(trial->more * weight + more / clump, 0);
	trial->less = Max(trial->less * weight + less / clump, 0);
	trial->clump = clump;
	if (surely_more || trial->more > ENOUGH_MORE)
	{
		trial->more = trial->less = 0;
		return IDEM_MORE;
	}
	if (trial->less > ENOUGH_LESS)
	{
		memset(trial, 0, sizeof(*trial));
		return IDEM_LESS;
	}
	return IDEM_UNDECIDED;
}
