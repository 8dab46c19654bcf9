//! The ring of chunks (`src/cuda/ring.rs`, that very file) under loom, which tries every order in which threads
//! can meet.
//!
//! In: threads that take chunks, fill them, have them copied and give them back. Out: that none is filled while a
//! copy reads it, that none gets lost, and that nobody waits for ever.

#[allow(dead_code)] // The room uses all of it.
#[path = "../../../src/cuda/ring.rs"]
mod ring;

mod sync {
    pub use loom::sync::{Condvar, Mutex};

    use loom::sync::MutexGuard;

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().expect("no thread panics")
    }

    pub fn wait<'a, T>(more: &Condvar, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        more.wait(held).expect("no thread panics")
    }
}

#[cfg(test)]
mod tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use loom::thread;

    use crate::ring::{Chunk, Ring};

    /// A chunk whose copy, once begun, is over when somebody waits for it.
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
    }

    fn one_round(ring: &Ring<Busy>, made: &AtomicUsize, most: usize) {
        let chunk = ring.take(|| {
            assert!(made.fetch_add(1, Ordering::SeqCst) < most, "there are more than may be");
            Ok::<_, ()>(Busy { is_read: Arc::new(AtomicBool::new(false)) })
        });
        filled(ring, chunk.unwrap());
    }

    fn filled(ring: &Ring<Busy>, chunk: Busy) {
        // It is filled, which must be while nobody reads it; then a copy begins.
        assert!(!chunk.is_read.swap(true, Ordering::SeqCst), "filled while it is read");
        ring.give(chunk);
    }

    fn threads(count: usize, rounds: usize, most: usize) {
        let mut model = loom::model::Builder::new();
        // With more changes from one thread to another it takes hours.
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
            // None is lost: with as many at the most they are waited for, one after the other.
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
    fn whoever_waits_goes_on_when_the_only_chunk_is_lost() {
        loom::model(|| {
            let ring = Arc::new(Ring::<Busy>::new(1));
            let other = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || {
                    // Taken and never given back: its copy failed, and may go on for ever.
                    let taken = ring
                        .take(|| Ok::<_, ()>(Busy { is_read: Arc::new(AtomicBool::new(true)) }));
                    drop(taken.unwrap());
                    ring.lost();
                })
            };
            let made = AtomicUsize::new(0);
            one_round(&ring, &made, 1);
            other.join().unwrap();
        });
    }

    /// A chunk of which it is not known, the first time, whether it is idle.
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
    }

    #[test]
    fn whoever_waits_goes_on_when_another_fails() {
        loom::model(|| {
            let ring = Arc::new(Ring::new(1));
            let chunk = ring.take(|| Ok::<_, ()>(Doubtful { is_known: AtomicBool::new(false) }));
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let ring = Arc::clone(&ring);
                    thread::spawn(move || {
                        let taken = ring.take(|| Err(()));
                        taken.into_iter().for_each(|chunk| ring.give(chunk));
                    })
                })
                .collect();
            ring.give(chunk.ok().unwrap());
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }

    /// Where none can be made nobody waits for one.
    #[test]
    fn who_cannot_make_any_is_told() {
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

    /// Where no more can be made, whoever failed to make one goes on with those that there are.
    #[test]
    fn who_cannot_make_one_waits_for_another() {
        loom::model(|| {
            let (ring, made) = (Arc::new(Ring::<Busy>::new(2)), Arc::new(AtomicUsize::new(0)));
            let round = |ring: &Ring<Busy>, made: &AtomicUsize| {
                let chunk = ring.take(|| match made.fetch_add(1, Ordering::SeqCst) {
                    0 => Ok(Busy { is_read: Arc::new(AtomicBool::new(false)) }),
                    _ => Err(()),
                });
                // Only while there is none at all.
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
