/*-------------------------------------------------------------------------
 *
 * chance.c
 *	  What a count in a sample says of the whole.
 *
 * Rare things come into a sample by chance, as many as a Poisson distribution
 * has it, if each comes by itself.  Whether the whole is above or below a
 * threshold is said only if at the threshold such a count would be rare; else
 * who looks again and again would see it turn each time.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "chance.h"

#define RARE 0.02
#define RARE_DEVIATIONS 2.05	/* the same, of a normal distribution */
#define LARGE 500				/* from here on, it is one */

/* The probability of at most so many. */
static double
at_most(double n, double expected)
{
	double		term = exp(-expected);
	double		sum = 0;

	for (int i = 0; i <= n; i++)
	{
		sum += term;
		term *= expected / (i + 1);
	}
	return sum;
}

static double
deviations(IdemEvidence evidence)
{
	return (evidence.found - evidence.expected) / sqrt(evidence.expected);
}

bool
idem_surely_more(IdemEvidence evidence)
{
	if (evidence.expected >= LARGE)
		return deviations(evidence) > RARE_DEVIATIONS;
	return evidence.found > evidence.expected &&
		1 - at_most(evidence.found - 1, evidence.expected) < RARE;
}

bool
idem_surely_less(IdemEvidence evidence)
{
	if (evidence.expected >= LARGE)
		return deviations(evidence) < -RARE_DEVIATIONS;
	return evidence.found < evidence.expected && at_most(evidence.found, evidence.expected) < RARE;
}
