//! Streams and events: queued work, and the waits that do it, as far as they wait and no further.
//!
//! The work of a stream is numbered from 1. A wait names a stream and a number, and is over once the stream has done
//! so much. Work waits only for work that was queued before it, so that no two wait for each other.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;

use crate::codes;
use crate::faults::Fault;
use crate::handles::Handles;
use crate::kernels::{Kernel, Launch};
use crate::memory::Side;

/// A piece of work.
#[derive(Debug)]
pub enum Work {
    Copy {
        to: Side,
        from: Side,
        bytes: usize,
    },
    /// Bytes that were read from pageable memory when the work was queued.
    Write {
        to: u64,
        bytes: Vec<u8>,
    },
    Fill {
        to: u64,
        value: u8,
        bytes: usize,
    },
    Run {
        kernel: Arc<Kernel>,
        launch: Launch,
    },
    Free {
        address: u64,
    },
    Record {
        event: u64,
    },
    Wait(Point),
}

/// A point in the work of a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub stream: u64,
    pub number: u64,
}

pub struct Stream {
    pub context: u64,
    pub flags: u32,
    pub priority: i32,
    pub kind: StreamKind,
    queue: VecDeque<Work>,
    done: u64,
}

#[derive(Clone, Copy, PartialEq)]
pub enum StreamKind {
    /// Created by `cuStreamCreate`.
    Created,
    /// Destroyed before its work was done, which a later wait does.
    Destroyed,
    /// The legacy stream of a context: it waits for all blocking streams, and they wait for it.
    Legacy,
    /// The stream of a context that each thread has for itself.
    OfThread(ThreadId),
}

#[derive(Default)]
pub struct Event {
    pub context: u64,
    pub flags: u32,
    /// The point of its last record.
    pub recorded: Option<Point>,
    /// The time when that point was reached.
    pub time: Option<std::time::Instant>,
}

#[derive(Default)]
pub struct Streams {
    pub streams: BTreeMap<u64, Stream>,
    pub events: BTreeMap<u64, Event>,
}

impl Stream {
    pub fn new(context: u64, flags: u32, priority: i32, kind: StreamKind) -> Stream {
        Stream { context, flags, priority, kind, queue: VecDeque::new(), done: 0 }
    }

    fn blocks(&self) -> bool {
        const NON_BLOCKING: u32 = 1;
        self.flags & NON_BLOCKING == 0
    }

    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    fn work_count(&self) -> u64 {
        self.done + self.queue.len() as u64
    }
}

impl Streams {
    /// The point at which a stream has done all its work.
    pub fn end_of(&self, stream: u64) -> Point {
        Point { stream, number: self.streams.get(&stream).map_or(0, Stream::work_count) }
    }

    /// Whether a point was reached. A stream that is gone has done everything.
    pub fn is_done(&self, point: Point) -> bool {
        self.streams.get(&point.stream).is_none_or(|stream| stream.done >= point.number)
    }

    /// The number of queued pieces in a context, or in one stream of it, that move bytes or wait for those that do. The
    /// others are harmless whenever they are done.
    pub fn pending(&self, context: u64, only: Option<u64>) -> usize {
        let is_left = |work: &Work| match work {
            Work::Wait(point) => !self.is_done(*point),
            Work::Copy { .. } | Work::Write { .. } | Work::Fill { .. } | Work::Run { .. } => true,
            Work::Free { .. } | Work::Record { .. } => false,
        };
        let meant = self.streams.iter().filter(|(id, stream)| {
            stream.context == context && only.is_none_or(|only| only == **id)
        });
        meant.flat_map(|(_, stream)| &stream.queue).filter(|work| is_left(work)).count()
    }

    /// The streams of a context that have work.
    fn busy(&self, context: u64, which: impl Fn(&Stream) -> bool) -> Vec<Point> {
        let busy = self.streams.iter().filter(|(_, stream)| {
            stream.context == context && !stream.queue.is_empty() && which(stream)
        });
        busy.map(|(&id, _)| self.end_of(id)).collect()
    }

    /// The points of a context that its legacy stream waits for.
    pub fn before_legacy(&self, context: u64) -> Vec<Point> {
        self.busy(context, Stream::blocks)
    }

    /// The points at which a context has done all its work.
    pub fn all_of(&self, context: u64) -> Vec<Point> {
        self.busy(context, |_| true)
    }

    /// Queued work anywhere that a condition holds for.
    pub fn needed_by(&self, needs: impl Fn(&Work) -> bool) -> Option<String> {
        let found = self.streams.iter().find_map(|(id, stream)| {
            stream.queue.iter().find(|work| needs(work)).map(|work| (id, work.name()))
        });
        found
            .map(|(id, name)| format!("{name} that is queued in the stream {id:#x} still needs it"))
    }

    /// Queued work that needs a range of pinned or registered memory, as the rest of a fault's description.
    pub fn host_memory_needed_by(&self, base: usize, bytes: usize) -> Option<String> {
        let is_inside = |&(side, _): &(Side, usize)| matches!(side, Side::Host(at) if (base..base + bytes).contains(&at));
        self.needed_by(|work| work.ranges().iter().any(is_inside))
    }

    /// Queued work that needs device memory, as the rest of a fault's description.
    pub fn device_memory_needed_by(&self, base: u64, bytes: usize) -> Option<String> {
        let range = base..base + bytes as u64;
        let is_inside =
            |&(side, _): &(Side, usize)| matches!(side, Side::Device(at) if range.contains(&at));
        self.needed_by(|work| {
            work.ranges().iter().any(is_inside)
                || matches!(work, Work::Free { address } if *address == base)
        })
    }

    /// The stream of a handle; null is that of the current context.
    pub fn stream(
        &mut self,
        handle: u64,
        current: u64,
        handles: &mut Handles,
    ) -> Result<u64, Fault> {
        let kind = match handle {
            0 | 1 => StreamKind::Legacy,
            2 => StreamKind::OfThread(std::thread::current().id()),
            _ => {
                let found = self.streams.get(&handle);
                if found.is_some_and(|stream| stream.kind == StreamKind::Created) {
                    return Ok(handle);
                }
                let words = handles.describe_missing(handle, "a stream");
                return Err(Fault::new(codes::INVALID_HANDLE, words));
            }
        };
        if current == 0 {
            let words = "the stream is that of the current context, and none is current";
            return Err(Fault::new(codes::INVALID_CONTEXT, words));
        }
        let found = self.streams.iter().find(|(_, s)| s.context == current && s.kind == kind);
        if let Some((&id, _)) = found {
            return Ok(id);
        }
        let id = handles.issue();
        self.streams.insert(id, Stream::new(current, 0, 0, kind));
        Ok(id)
    }

    /// An existing event.
    pub fn event(&mut self, handle: u64, handles: &Handles) -> Result<&mut Event, Fault> {
        self.events.get_mut(&handle).ok_or_else(|| {
            Fault::new(codes::INVALID_HANDLE, handles.describe_missing(handle, "an event"))
        })
    }

    /// Queues work on a stream.
    pub fn queue(&mut self, stream: u64, work: Work) -> Point {
        let about = self.streams.get(&stream).map(|s| (s.context, s.kind, s.blocks()));
        let before = match about {
            Some((context, StreamKind::Legacy, _)) => self.before_legacy(context),
            Some((context, _, true)) => self.busy(context, |s| s.kind == StreamKind::Legacy),
            _ => Vec::new(),
        };
        if let Some(target) = self.streams.get_mut(&stream) {
            let others = before.into_iter().filter(|point| point.stream != stream);
            target.queue.extend(others.map(Work::Wait));
            target.queue.push_back(work);
        }
        self.end_of(stream)
    }

    /// Takes one piece of work off its queue: the next of a stream, or the next of what that waits for.
    pub fn take_next(&mut self, id: u64) -> Option<Work> {
        let stream = self.streams.get(&id)?;
        if let Some(&Work::Wait(point)) = stream.queue.front()
            && !self.is_done(point)
        {
            return self.take_next(point.stream);
        }
        let stream = self.streams.get_mut(&id)?;
        let work = stream.queue.pop_front();
        stream.done += u64::from(work.is_some());
        if stream.kind == StreamKind::Destroyed && stream.queue.is_empty() {
            self.streams.remove(&id);
        }
        work
    }
}

impl Work {
    fn name(&self) -> &'static str {
        match self {
            Work::Copy { .. } | Work::Write { .. } => "a copy",
            Work::Fill { .. } => "a memset",
            Work::Run { .. } => "a kernel",
            Work::Free { .. } => "a free",
            Work::Record { .. } => "a record",
            Work::Wait(_) => "a wait",
        }
    }

    /// The ranges that the work reads and writes.
    pub fn ranges(&self) -> Vec<(Side, usize)> {
        match self {
            Work::Copy { to, from, bytes } => vec![(*to, *bytes), (*from, *bytes)],
            Work::Write { to, bytes } => vec![(Side::Device(*to), bytes.len())],
            Work::Fill { to, bytes, .. } => vec![(Side::Device(*to), *bytes)],
            // Each parameter may be where memory begins that the kernel needs.
            Work::Run { launch, .. } => {
                let sides =
                    |&value: &u64| [(Side::Device(value), 1), (Side::Host(value as usize), 1)];
                launch.params.iter().flat_map(sides).collect()
            }
            Work::Free { .. } | Work::Record { .. } | Work::Wait(_) => Vec::new(),
        }
    }
}
