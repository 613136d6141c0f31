/*-------------------------------------------------------------------------
 *
 * chance.h
 *	  What a count in a sample says of the whole.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CHANCE_H
#define IDEM_CHANCE_H

/* A count, and the one to be expected if the whole were at its threshold. */
typedef struct IdemEvidence
{
	double		expected;		/* with found: all zero where there is none */
	double		found;
} IdemEvidence;

extern bool idem_surely_more(IdemEvidence evidence);
extern bool idem_surely_less(IdemEvidence evidence);

#endif							/* IDEM_CHANCE_H */
