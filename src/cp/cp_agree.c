/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_agree.c - see cp_agree.h. One gather of a fixed-size record; the lowest rank with something to
 * say is quoted on all others.
 */
#include "cp/cp_agree.h"

uint64_t dr_cp_digest(uint64_t h, const void *data, size_t bytes)
{
    const unsigned char *c = data;
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ c[i]) * 0x100000001b3u;
    return h;
}

uint64_t dr_cp_digest_offsets(const int64_t *offsets, int64_t sequences)
{
    if (offsets == NULL)
        return DR_DIGEST;
    return dr_cp_digest(DR_DIGEST, offsets, (size_t)(sequences + 1) * sizeof *offsets);
}

uint64_t dr_cp_digest_partition(const dr_partition *partition)
{
    uint64_t h = dr_cp_digest(DR_DIGEST, &partition->ranks, sizeof partition->ranks);
    for (int64_t i = 0; i < partition->count; i++) {
        const dr_fragment *f = &partition->fragments[i];
        const int64_t row[] = {f->begin, f->end, f->rank};
        h = dr_cp_digest(h, row, sizeof row);
    }
    return h;
}

void dr_agreement_set(dr_agreement *mine, dr_status status)
{
    mine->status = status;
    mine->sentence[0] = 0;
    if (status != DR_OK)
        strncpy(mine->sentence, dr_last_error(), sizeof mine->sentence - 1);
}

static dr_status refusal(const dr_comm *comm, const dr_agreement *mine, dr_agreement *of, int32_t rank)
{
    of->sentence[sizeof of->sentence - 1] = 0; /* it came from elsewhere */
    if (rank == comm->rank)
        return dr_fail((dr_status)mine->status, "%s", mine->sentence);
    return dr_fail((dr_status)of->status, "rank %d refused: %s", rank, of->sentence);
}

dr_status dr_cp_agree(dr_comm *comm, const dr_agreement *mine, const char *const what[DR_AGREED])
{
    dr_agreement *all = dr_alloc((size_t)comm->size * sizeof *all);
    if (all == NULL) {
        dr_comm_abort(comm, "no memory for the agreement");
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %d ranks", comm->size);
    }
    dr_status status = dr_comm_allgather(comm, mine, all, sizeof *mine);
    if (status != DR_OK) /* this rank alone may know: the others must not wait for it */
        dr_comm_abort(comm, dr_last_error());
    for (int32_t r = 0; status == DR_OK && r < comm->size; r++)
        if (all[r].status != DR_OK)
            status = refusal(comm, mine, &all[r], r);
    for (int32_t r = 1; status == DR_OK && r < comm->size; r++)
        for (size_t i = 0; i < DR_AGREED && status == DR_OK; i++)
            if (what[i] != NULL && all[r].digest[i] != all[0].digest[i])
                status = dr_fail(DR_ERR_ARG, "%s: must be the same on all ranks, but rank %d differs from rank 0",
                                 what[i], r);
    dr_free(all);
    return status;
}

/* Keeps the first failure: dr_last_error may change while the others are waited for. */
static void note(dr_comm *comm, dr_agreement *first, dr_status status)
{
    if (status == DR_OK || first->status != DR_OK)
        return;
    dr_agreement_set(first, status);
    dr_comm_abort(comm, first->sentence);
}

dr_status dr_cp_settle(dr_comm *comm, dr_status status, dr_batch *const *batches, int64_t n)
{
    dr_agreement first = {0};
    note(comm, &first, status);
    for (int64_t i = 0; i < n; i++)
        if (batches[i] != NULL)
            note(comm, &first, dr_comm_wait(batches[i]));
    return first.status == DR_OK ? DR_OK : dr_fail((dr_status)first.status, "%s", first.sentence);
}
