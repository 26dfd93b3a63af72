/* Queues of operations, linked through their `next`. */
#include "engine.h"

void ec_append(struct ec_queue *queue, struct ec_op *op)
{
    op->next = NULL;
    if (queue->tail)
        queue->tail->next = op;
    else
        queue->head = op;
    queue->tail = op;
}

struct ec_op *ec_pop(struct ec_queue *queue)
{
    struct ec_op *op = queue->head;
    if (op)
        ec_unlink(queue, op);
    return op;
}

void ec_unlink(struct ec_queue *queue, struct ec_op *op)
{
    struct ec_op *before = NULL, *here = queue->head;
    while (here && here != op) {
        before = here;
        here = here->next;
    }
    if (!here)
        return;
    if (before)
        before->next = op->next;
    else
        queue->head = op->next;
    if (queue->tail == op)
        queue->tail = before;
}
