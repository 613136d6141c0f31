/*-------------------------------------------------------------------------
 *
 * chance.h
 *	  What counts in samples say of the whole.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CHANCE_H
#define IDEM_CHANCE_H

/* A sample's count, and the one to be expected if the whole were at its threshold. */
typedef struct IdemEvidence
{
	double		expected;		/* with found: all zero where there is none */
	double		found;
	double		clump;			/* the most that lay together, at least 1 */
} IdemEvidence;

/* What the samples so far say, one after the other; begins all zero. */
typedef struct IdemTrial
{
	double		more;			/* logarithms of likelihood ratios */
	double		less;
	double		clump;
} IdemTrial;

typedef enum IdemVerdict
{
	IDEM_UNDECIDED,
	IDEM_MORE,
	IDEM_LESS
} IdemVerdict;

extern bool idem_surely_more(IdemEvidence evidence);
extern IdemVerdict idem_weigh(IdemTrial *trial, IdemEvidence evidence, bool surely_more);

#endif							/* IDEM_CHANCE_H */
