// TPipe and its queues, events and barriers.
#pragma once

#include "tensor.h"
#include "together.h"

namespace AscendC {

using TEventID = int8_t;

template <HardEvent event>
void SetFlag(int32_t id)
{
    constexpr twin::Ends ends = twin::EndsOf(event);
    if (id < 0 || id > 7) twin::Refuse("SetFlag: event %d; there are 0 to 7", id);
    auto& flag = twin::Here().flags[ends.from][ends.to][id];
    if (flag.set) twin::Refuse("SetFlag: event %d from %s to %s is set already", id, twin::PIPE_NAME[ends.from],
                               twin::PIPE_NAME[ends.to]);
    flag = {true, twin::Here().now[ends.from]};
}

template <HardEvent event>
void WaitFlag(int32_t id)
{
    constexpr twin::Ends ends = twin::EndsOf(event);
    if (id < 0 || id > 7) twin::Refuse("WaitFlag: event %d; there are 0 to 7", id);
    auto& flag = twin::Here().flags[ends.from][ends.to][id];
    if (!flag.set) twin::Refuse("WaitFlag: nobody set event %d from %s to %s: the core would wait for ever", id,
                                twin::PIPE_NAME[ends.from], twin::PIPE_NAME[ends.to]);
    twin::Join(twin::Here().now[ends.to], flag.at);
    flag.set = false;
}

template <pipe_t pipe>
void PipeBarrier()
{
    if constexpr (pipe == PIPE_ALL || pipe == PIPE_M) twin::Here().product = -1;
    if constexpr (pipe == PIPE_ALL) {
        auto& now = twin::Here().now;
        twin::Clock all{};
        for (const twin::Clock& clock : now) twin::Join(all, clock);
        for (twin::Clock& clock : now) twin::Join(clock, all);
    }
}

// A queue between two positions: who fills its buffers, who empties them.
template <TPosition src, TPosition dst, int32_t depth, auto mask = 0>
class TQueBind {
public:
    template <typename T>
    LocalTensor<T> AllocTensor()
    {
        for (uint32_t i = 0; i < count; i++) {  // buffers go round, as they do on the device
            twin::Buffer& buffer = first[(next + i) % count];
            if (buffer.held != twin::Held::FREE) continue;
            next = (next + i + 1) % count;
            twin::Join(twin::Here().now[From()], buffer.released);
            return Hand<T>(buffer, twin::Held::ALLOCATED, src);
        }
        twin::Refuse("AllocTensor: all %u buffers of the queue are in use", count);
    }

    template <typename T>
    bool EnQue(const LocalTensor<T>& tensor)
    {
        tensor.place.Address("EnQue");
        twin::Buffer& buffer = *tensor.place.buffer;
        if (buffer.held != twin::Held::ALLOCATED) twin::Refuse("EnQue: the tensor was not allocated from a queue");
        if (int32_t(queued.size()) >= std::max(depth, 1))
            twin::Refuse("EnQue: the queue is %d deep and full", std::max(depth, 1));
        buffer.ready = twin::Here().now[From()];
        buffer.held = twin::Held::QUEUED;
        buffer.turn++;
        queued.push_back(&buffer);
        return true;
    }

    template <typename T>
    LocalTensor<T> DeQue()
    {
        if (queued.empty()) twin::Refuse("DeQue: the queue is empty");
        twin::Buffer& buffer = *queued.front();
        queued.pop_front();
        twin::Join(twin::Here().now[To()], buffer.ready);
        return Hand<T>(buffer, twin::Held::DEQUEUED, dst);
    }

    template <typename T>
    void FreeTensor(LocalTensor<T>& tensor)
    {
        tensor.place.Address("FreeTensor");
        twin::Buffer& buffer = *tensor.place.buffer;
        if (buffer.held == twin::Held::ALWAYS) twin::Refuse("FreeTensor: the tensor is of no queue");
        buffer.released = twin::Here().now[To()];
        buffer.held = twin::Held::FREE;
        buffer.turn++;
    }

    static constexpr bool isTQue = true;
    static constexpr TPosition position = src == TPosition::GM ? dst : src;
    twin::Buffer* first = nullptr;  // `count` of them, side by side
    uint32_t count = 0;

private:
    // GM fills VECIN and L1 through MTE2, L1 fills L0A and L0B, the Cube L0C; VECOUT leaves through MTE3, L0C through FIX;
    // all else is the vector unit's.
    static constexpr twin::Pipe From()
    {
        using P = TPosition;
        return src == P::VECIN || src == P::A1 || src == P::B1 ? twin::PIPE_OF_MTE2
               : src == P::A2 || src == P::B2                  ? twin::PIPE_OF_MTE1
               : src == P::CO1                                 ? twin::PIPE_OF_M
                                                               : twin::PIPE_OF_V;
    }
    static constexpr twin::Pipe To()
    {
        using P = TPosition;
        return dst == P::VECOUT                ? twin::PIPE_OF_MTE3
               : dst == P::A1 || dst == P::B1 ? twin::PIPE_OF_MTE1
               : dst == P::A2 || dst == P::B2 ? twin::PIPE_OF_M
               : dst == P::CO1                ? twin::PIPE_OF_FIX
                                              : twin::PIPE_OF_V;
    }

    template <typename T>
    LocalTensor<T> Hand(twin::Buffer& buffer, twin::Held held, TPosition at)
    {
        buffer.held = held;
        buffer.turn++;
        LocalTensor<T> tensor;
        tensor.place = {&buffer, buffer.turn, at, 0};
        tensor.size = buffer.size / uint32_t(sizeof(T));
        return tensor;
    }

    std::deque<twin::Buffer*> queued;
    uint32_t next = 0;
};

// A queue at VECIN is filled by a copy and read by the vector unit; at VECOUT the other way round.
template <TPosition pos, int32_t depth, auto mask = 0>
class TQue : public TQueBind<pos, pos, depth, mask> {};

template <TPosition pos = TPosition::LCM>
class TBuf {
public:
    template <typename T>
    LocalTensor<T> Get()
    {
        return Get<T>(buffer ? buffer->size / uint32_t(sizeof(T)) : 0);
    }

    template <typename T>
    LocalTensor<T> Get(uint32_t size)
    {
        return GetWithOffset<T>(size, 0);
    }

    template <typename T>
    LocalTensor<T> GetWithOffset(uint32_t size, uint32_t offset)
    {
        if (!buffer) twin::Refuse("Get: the buffer was not initialised");
        if (offset + size * sizeof(T) > buffer->size)
            twin::Refuse("Get: %u elements at byte %u of a buffer of %u bytes", size, offset, buffer->size);
        LocalTensor<T> tensor;
        tensor.place = {buffer, buffer->turn, pos, offset};
        tensor.size = size;
        return tensor;
    }

    static constexpr bool isTQue = false;
    twin::Buffer* buffer = nullptr;
};

class TPipe {
public:
    template <class Queue>
    bool InitBuffer(Queue& queue, uint8_t count, uint32_t bytes)
    {
        static_assert(Queue::isTQue, "a TBuf has one buffer: InitBuffer(buf, bytes)");
        if (!count) twin::Refuse("InitBuffer: a queue of no buffers");
        queue.count = count;
        for (uint32_t i = 0; i < count; i++) {
            twin::Buffer* made = Make(twin::SpaceOf(Queue::position), bytes, twin::Held::FREE);
            if (!i) queue.first = made;
        }
        return true;
    }

    template <TPosition pos>
    bool InitBuffer(TBuf<pos>& buf, uint32_t bytes)
    {
        buf.buffer = Make(twin::SpaceOf(pos), bytes, twin::Held::ALWAYS);
        return true;
    }

    template <HardEvent event>
    TEventID AllocEventID()
    {
        return next_event[int(event)]++ & 7;
    }
    template <HardEvent event>
    void ReleaseEventID(TEventID)
    {
    }
    TEventID FetchEventID(HardEvent) { return 0; }
    template <HardEvent event>
    TEventID FetchEventID()
    {
        return 0;
    }

private:
    static twin::Buffer* Make(twin::SpaceId id, uint32_t bytes, twin::Held held)
    {
        twin::Core& core = twin::Here();
        twin::Space& space = core.space[id];
        const uint32_t size = (bytes + twin::BLOCK - 1) / twin::BLOCK * twin::BLOCK;
        if (!size) twin::Refuse("InitBuffer: a buffer of no bytes");
        if (size > twin::SIZE[id] - space.used)
            twin::Refuse("InitBuffer: %u bytes of %s wanted, %u of %u are left", size, twin::SPACE_NAME[id],
                         twin::SIZE[id] - space.used, twin::SIZE[id]);
        if (core.buffers.size() == twin::BUFFERS) twin::Refuse("InitBuffer: more than %u buffers", twin::BUFFERS);
        core.buffers.push_back({id, space.used, size, held, 0, {}, {}});
        space.Grow(size);
        return &core.buffers.back();
    }

    int8_t next_event[32] = {};
};

}  // namespace AscendC
