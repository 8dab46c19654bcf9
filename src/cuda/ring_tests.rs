//! The ring, one step after the other. Of threads: `proofs/ring`.

use std::cell::Cell;
use std::rc::Rc;

use proptest::prelude::*;

use super::ring::{Chunk, Ring};

/// Idle from a time on.
struct Timed {
    number: usize,
    from: u32,
    now: Rc<Cell<u32>>,
}

impl Chunk for Timed {
    type Fault = ();

    fn is_idle(&self) -> Result<bool, ()> {
        Ok(self.from <= self.now.get())
    }

    fn wait(&self) -> Result<(), ()> {
        self.now.set(self.now.get().max(self.from));
        Ok(())
    }
}

proptest! {
    /// Whoever gets a chunk gets one that is idle and that nobody else has; there are never more than may
    /// be; and no time passes by waiting where one was idle or could be made.
    #[test]
    fn chunks_are_idle_few_and_one_persons(
        most in 1usize..6,
        steps in prop::collection::vec((any::<bool>(), 0u32..5), 1..60),
    ) {
        let now = Rc::new(Cell::new(0));
        let ring = Ring::new(most);
        let (mut made, mut held) = (0, Vec::<Timed>::new());
        for (takes, later) in steps {
            if takes && held.len() < most {
                let before = now.get();
                let chunk = ring.take(|| {
                    made += 1;
                    Ok::<_, ()>(Timed { number: made, from: 0, now: Rc::clone(&now) })
                }).unwrap();
                prop_assert!(chunk.from <= now.get());
                prop_assert!(now.get() == before || made == most);
                prop_assert!(held.iter().all(|other| other.number != chunk.number));
                prop_assert!(made <= most);
                held.push(chunk);
            } else if let Some(mut chunk) = held.pop() {
                chunk.from = now.get() + later;
                ring.give(chunk);
            }
        }
        let (had, out) = (ring.drain().len(), held.len());
        prop_assert_eq!(had + out, made);
    }
}

#[test]
fn what_could_not_be_made_may_be_made_later() {
    let ring = Ring::<Timed>::new(1);
    assert!(ring.take(|| Err::<Timed, ()>(())).is_err());
    let now = Rc::new(Cell::new(0));
    assert!(ring.take(|| Ok::<_, ()>(Timed { number: 1, from: 0, now })).is_ok());
}
