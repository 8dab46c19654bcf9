//! Tests of the ring of chunks (`src/cuda/ring.rs`, that very file) under loom, which tries every interleaving of
//! threads.
//!
//! Threads take chunks, fill them, start copies and give them back. No chunk is filled while a copy reads it, none
//! gets lost, and no thread waits for ever.

#[allow(dead_code)] // The crate uses all of it.
#[path = "../../../src/cuda/ring.rs"]
mod ring;

mod sync {
    pub use loom::sync::{Condvar, Mutex};

    use loom::sync::MutexGuard;

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().expect("no thread panics")
    }

    pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        condvar.wait(guard).expect("no thread panics")
    }
}

#[cfg(test)]
mod tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use loom::thread;

    use crate::ring::{Chunk, Ring};

    /// A chunk whose copy, once started, is done when a thread waits for it.
    struct Busy {
        is_read: Arc<AtomicBool>,
    }

    impl Chunk for Busy {
        type Fault = ();

        fn is_idle(&self) -> Result<bool, ()> {
            Ok(!self.is_read.load(Ordering::SeqCst))
        }

        fn wait(&self) -> Result<(), ()> {
            self.is_read.store(false, Ordering::SeqCst);
            Ok(())
        }

        fn wait_briefly(&self) -> Result<bool, ()> {
            self.is_idle()
        }
    }

    fn one_round(ring: &Ring<Busy>, made: &AtomicUsize, most: usize) {
        let chunk = ring.take(|| {
            assert!(made.fetch_add(1, Ordering::SeqCst) < most, "more chunks than the ring allows");
            Ok::<_, ()>(Busy { is_read: Arc::new(AtomicBool::new(false)) })
        });
        filled(ring, chunk.unwrap());
    }

    fn filled(ring: &Ring<Busy>, chunk: Busy) {
        // No copy may read the chunk while it is filled. Then a copy starts.
        assert!(!chunk.is_read.swap(true, Ordering::SeqCst), "filled while it is read");
        ring.give_back(chunk);
    }

    fn threads(count: usize, rounds: usize, most: usize) {
        let mut model = loom::model::Builder::new();
        // With more preemptions it takes hours.
        model.preemption_bound = Some(3);
        model.check(move || {
            let (ring, made) = (Arc::new(Ring::new(most)), Arc::new(AtomicUsize::new(0)));
            let others: Vec<_> = (1..count)
                .map(|_| {
                    let (ring, made) = (Arc::clone(&ring), Arc::clone(&made));
                    thread::spawn(move || (0..rounds).for_each(|_| one_round(&ring, &made, most)))
                })
                .collect();
            (0..rounds).for_each(|_| one_round(&ring, &made, most));
            others.into_iter().for_each(|other| other.join().unwrap());
            // No chunk is lost: all can be taken, one after the other.
            let made = made.load(Ordering::SeqCst);
            ring.shrink(0, |_| panic!("it is read"));
            let no_more = || Err(());
            (0..made).for_each(|_| drop(ring.take(no_more).unwrap()));
        });
    }

    #[test]
    fn two_threads_share_one_chunk() {
        threads(2, 2, 1);
    }

    #[test]
    fn three_threads_share_two_chunks() {
        threads(3, 1, 2);
    }

    #[test]
    fn a_waiting_thread_goes_on_when_the_only_chunk_is_lost() {
        loom::model(|| {
            let ring = Arc::new(Ring::<Busy>::new(1));
            let other = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || {
                    // Taken and never given back: its copy failed, and may never end.
                    let taken = ring
                        .take(|| Ok::<_, ()>(Busy { is_read: Arc::new(AtomicBool::new(true)) }));
                    drop(taken.unwrap());
                    ring.note_lost();
                })
            };
            let made = AtomicUsize::new(0);
            one_round(&ring, &made, 1);
            other.join().unwrap();
        });
    }

    /// A chunk whose copies wait for other work.
    struct Stuck;

    impl Chunk for Stuck {
        type Fault = ();

        fn is_idle(&self) -> Result<bool, ()> {
            Ok(false)
        }

        fn wait(&self) -> Result<(), ()> {
            panic!("it would wait for ever");
        }

        fn wait_briefly(&self) -> Result<bool, ()> {
            Ok(false)
        }
    }

    #[test]
    fn chunks_that_stay_busy_are_left_alone_while_another_can_be_allocated() {
        loom::model(|| {
            let ring = Ring::new(3);
            let take = |ring: &Ring<Stuck>| ring.take(|| Ok::<_, ()>(Stuck)).unwrap();
            (0..3).for_each(|_| ring.give_back(take(&ring)));
        });
    }

    /// A chunk that fails at the first query whether it is idle.
    struct Doubtful {
        is_known: AtomicBool,
    }

    impl Chunk for Doubtful {
        type Fault = ();

        fn is_idle(&self) -> Result<bool, ()> {
            self.is_known.swap(true, Ordering::SeqCst).then_some(true).ok_or(())
        }

        fn wait(&self) -> Result<(), ()> {
            Ok(())
        }

        fn wait_briefly(&self) -> Result<bool, ()> {
            Ok(true)
        }
    }

    #[test]
    fn a_waiting_thread_goes_on_when_another_fails() {
        loom::model(|| {
            let ring = Arc::new(Ring::new(1));
            let chunk = ring.take(|| Ok::<_, ()>(Doubtful { is_known: AtomicBool::new(false) }));
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let ring = Arc::clone(&ring);
                    thread::spawn(move || {
                        let taken = ring.take(|| Err(()));
                        taken.into_iter().for_each(|chunk| ring.give_back(chunk));
                    })
                })
                .collect();
            ring.give_back(chunk.ok().unwrap());
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }

    /// If no chunk can be allocated, no thread waits for one.
    #[test]
    fn an_error_is_returned_if_no_chunk_can_be_allocated() {
        loom::model(|| {
            let ring = Arc::new(Ring::<Busy>::new(1));
            let other = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || assert!(ring.take(|| Err(())).is_err()))
            };
            assert!(ring.take(|| Err(())).is_err());
            other.join().unwrap();
        });
    }

    /// If no more chunks can be allocated, a thread that failed to allocate one goes on with the others.
    #[test]
    fn a_thread_that_cannot_allocate_waits_for_a_chunk() {
        loom::model(|| {
            let (ring, made) = (Arc::new(Ring::<Busy>::new(2)), Arc::new(AtomicUsize::new(0)));
            let round = |ring: &Ring<Busy>, made: &AtomicUsize| {
                let chunk = ring.take(|| match made.fetch_add(1, Ordering::SeqCst) {
                    0 => Ok(Busy { is_read: Arc::new(AtomicBool::new(false)) }),
                    _ => Err(()),
                });
                // An error only while no chunk exists.
                if let Ok(chunk) = chunk {
                    filled(ring, chunk);
                }
            };
            let other = {
                let (ring, made) = (Arc::clone(&ring), Arc::clone(&made));
                thread::spawn(move || round(&ring, &made))
            };
            round(&ring, &made);
            other.join().unwrap();
        });
    }
}
