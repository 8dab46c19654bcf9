//! The ring with one thread. `proofs/ring` has several.

use std::cell::Cell;
use std::rc::Rc;

use proptest::prelude::*;

use super::ring::{Chunk, Ring};

/// A chunk that is idle from a time on.
struct TimedChunk {
    number: usize,
    idle_at: u32,
    now: Rc<Cell<u32>>,
}

impl Chunk for TimedChunk {
    type Fault = ();

    fn is_idle(&self) -> Result<bool, ()> {
        Ok(self.idle_at <= self.now.get())
    }

    fn wait(&self) -> Result<(), ()> {
        self.now.set(self.now.get().max(self.idle_at));
        Ok(())
    }

    fn wait_briefly(&self) -> Result<bool, ()> {
        self.now.set(self.now.get().max(self.idle_at.min(self.now.get() + 1)));
        self.is_idle()
    }
}

proptest! {
    /// A chunk that is taken is idle and not taken twice. The limit holds. No time passes if a chunk is idle, and little
    /// if one can be allocated.
    #[test]
    fn chunks_are_idle_bounded_and_taken_once(
        most in 1usize..6,
        steps in prop::collection::vec((any::<bool>(), 0u32..5), 1..60),
    ) {
        let now = Rc::new(Cell::new(0));
        let ring = Ring::new(most);
        let (mut made, mut held) = (0, Vec::<TimedChunk>::new());
        for (takes, later) in steps {
            if takes && held.len() < most {
                let before = now.get();
                let chunk = ring.take(|| {
                    made += 1;
                    Ok::<_, ()>(TimedChunk { number: made, idle_at: 0, now: Rc::clone(&now) })
                }).unwrap();
                prop_assert!(chunk.idle_at <= now.get());
                prop_assert!(now.get() <= before + 1 || made == most);
                prop_assert!(now.get() == before || made - held.len() > 1 || made == most);
                prop_assert!(held.iter().all(|other| other.number != chunk.number));
                prop_assert!(made <= most);
                held.push(chunk);
            } else if let Some(mut chunk) = held.pop() {
                chunk.idle_at = now.get() + later;
                ring.give_back(chunk);
            }
        }
        // What is busy stays.
        let mut ended = 0;
        ring.shrink(0, |chunk| {
            assert!(chunk.idle_at <= now.get());
            ended += 1;
        });
        now.set(u32::MAX);
        ring.shrink(0, |_| ended += 1);
        prop_assert_eq!(ended + held.len(), made);
    }
}

#[test]
fn a_failed_allocation_may_succeed_later() {
    let ring = Ring::<TimedChunk>::new(1);
    assert!(ring.take(|| Err::<TimedChunk, ()>(())).is_err());
    let now = Rc::new(Cell::new(0));
    assert!(
        ring.take(|| Ok::<_, ()>(TimedChunk { number: 1, idle_at: 0, now: Rc::clone(&now) }))
            .is_ok()
    );
}

#[test]
fn existing_chunks_circulate_when_no_more_can_be_allocated() {
    let now = Rc::new(Cell::new(0));
    let ring = Ring::new(3);
    let tries = Cell::new(0);
    let one = || {
        tries.set(tries.get() + 1);
        if tries.get() > 1 {
            Err(())
        } else {
            Ok(TimedChunk { number: 1, idle_at: 0, now: Rc::clone(&now) })
        }
    };
    for round in 1..4 {
        let mut chunk = ring.take(one).unwrap();
        assert!(chunk.idle_at <= now.get());
        chunk.idle_at = now.get() + round;
        ring.give_back(chunk);
    }
    // Once it could not be made it was not tried again.
    assert_eq!((tries.get(), now.get()), (2, 3));
}

#[test]
fn shrinking_keeps_the_requested_number() {
    let now = Rc::new(Cell::new(0));
    let ring = Ring::new(4);
    let timed = |number, from| TimedChunk { number, idle_at: from, now: Rc::clone(&now) };
    let held: Vec<_> = (0..4).map(|n| ring.take(|| Ok::<_, ()>(timed(n, 0))).unwrap()).collect();
    held.into_iter().for_each(|chunk| ring.give_back(chunk));
    let mut gone = Vec::new();
    ring.shrink(3, |chunk| gone.push(chunk.number));
    assert_eq!(gone, [0]);
    ring.shrink(3, |_| panic!("there are no more"));
}

#[test]
fn a_chunk_counts_until_it_is_freed() {
    let ring = Ring::<TimedChunk>::new(1);
    let timed = |number| TimedChunk { number, idle_at: 0, now: Rc::new(Cell::new(0)) };
    ring.give_back(ring.take(|| Ok::<_, ()>(timed(0))).unwrap());
    ring.shrink(0, |_| assert!(ring.has_any()));
    assert!(!ring.has_any());
}
