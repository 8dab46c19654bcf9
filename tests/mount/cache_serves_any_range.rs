//! Any range of an open virtual file is answered exactly once, whatever the threads and the memory: with the
//! parsed bytes, or with an error.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, SystemTime};

use crate::common;
use crate::common::mounting::wait_until;
use crate::common::samples;
use crate::common::samples::{Numbers, all_samples, sharded};
use ckptfs::cache::{Cache, CacheLimits, CachedFile};
use ckptfs::checkpoint::{self, ParseOptions};
use ckptfs::recipe::Transform;
use ckptfs::virtual_file::{VirtualFile, VirtualFileReader};

/// Threads that read at once.
const ASKERS: u64 = 6;

const MIB: usize = 1 << 20;

/// Memory budgets: none at all, a few blocks, more than the sources.
const MEMORIES: [u64; 3] = [0, 4 << 20, 256 << 20];

fn open(path: &Path) -> Arc<VirtualFileReader> {
    let checkpoint = checkpoint::open(path, &ParseOptions::default()).expect("readable");
    let virtual_file = VirtualFile::new(checkpoint).expect("a virtual file");
    Arc::new(VirtualFileReader::open(&Arc::new(virtual_file)).expect("unchanged"))
}

fn evict(reader: &VirtualFileReader) {
    reader.virtual_file().source_files().iter().for_each(|file| samples::evict(&file.path()));
}

fn cache(memory: u64) -> Arc<Cache> {
    Cache::new(CacheLimits { memory_bytes: memory, readahead_bytes: Some(4 << 20) }, None)
}

type Answered = Receiver<Result<Vec<u8>, String>>;

fn ask(served: &Arc<CachedFile>, offset: usize, len: usize) -> Answered {
    let (say, messages) = channel();
    let callback = Box::new(move |answer: Result<&[u8], &ckptfs::cache::CacheError>| {
        // The receiver may be gone.
        let _ = say.send(answer.map(<[u8]>::to_vec).map_err(|e| e.to_string()));
    });
    served.read(offset as u64, len as u32, callback);
    messages
}

fn read(served: &Arc<CachedFile>, offset: usize, len: usize) -> Result<Vec<u8>, String> {
    let messages = ask(served, offset, len);
    let answer = messages.recv_timeout(Duration::from_secs(60)).expect("an answer");
    assert!(messages.recv().is_err(), "one answer and no more");
    answer
}

/// Ranges as programs read them: sequential and scattered, small and large.
fn ranges(seed: u64, size: usize) -> Vec<(usize, usize)> {
    let mut numbers = Numbers(seed);
    let mut ranges = Vec::new();
    for _ in 0..5 {
        let mut at = numbers.below(size);
        for _ in 0..numbers.below(30) {
            let len = 1 + numbers.below(200_000);
            ranges.push((at, len));
            at += len;
        }
        ranges.push((numbers.below(size), numbers.below(2 * MIB)));
        ranges.push((numbers.below(size + 10), numbers.below(20)));
    }
    ranges
}

#[test]
fn threads_get_the_right_bytes_with_any_memory() {
    for (name, (_directory, path)) in all_samples() {
        let reader = open(&path);
        let whole = common::whole(&reader);
        for memory in MEMORIES {
            for cold in [true, false] {
                if cold {
                    evict(&reader);
                }
                let cache = cache(memory);
                let served = cache.open(Arc::clone(&reader));
                std::thread::scope(|threads| {
                    for asker in 0..ASKERS {
                        let (served, whole, cache) = (&served, &whole, &cache);
                        threads.spawn(move || {
                            for (at, len) in ranges(asker + memory, whole.len()) {
                                let got = read(served, at, len).expect("readable");
                                let end = (at + len).min(whole.len());
                                assert!(got == whole[at.min(end)..end], "{name}: {at} + {len}");
                                let counters = cache.counters();
                                assert!(counters.held_bytes <= memory, "{counters:?}");
                            }
                        });
                    }
                });
                let counters = cache.counters();
                assert_eq!(
                    counters.reads,
                    counters.hits + counters.misses + counters.cached + counters.refused,
                    "{counters:?}"
                );
                assert!(!cold || name == "packed" || counters.misses > 0, "{name}: {counters:?}");
                assert_eq!((counters.errors, counters.refused), (0, 0));
                drop(served);
            }
        }
    }
}

fn open_cast(path: &Path, steps: &str) -> Arc<VirtualFileReader> {
    let transform = Transform::parse_json(steps, path).expect("valid");
    let checkpoint = checkpoint::open(path, &ParseOptions::default()).expect("readable");
    let cast = transform.apply(checkpoint, Vec::new()).expect("casts that exist");
    let cast = VirtualFile::new(cast).expect("a virtual file");
    Arc::new(VirtualFileReader::open(&Arc::new(cast)).expect("unchanged"))
}

/// Runs that are cast are read past the page cache, as plain ones are. Of byte-swapped ones only the bytes are compared.
#[test]
fn converted_runs_are_read_past_the_page_cache() {
    for ((_directory, path), steps, dtype) in samples::cast_samples() {
        let direct_bytes = [open_cast(&path, &steps), open(&path)].map(|reader| {
            let whole = common::whole(&reader);
            evict(&reader);
            let cache = cache(256 << 20);
            let served = cache.open(reader);
            for (at, len) in ranges(7, whole.len()) {
                let end = (at + len).min(whole.len());
                assert!(read(&served, at, len).expect("readable") == whole[at.min(end)..end]);
            }
            for at in (0..whole.len()).step_by(MIB) {
                let end = (at + MIB).min(whole.len());
                assert!(read(&served, at, MIB).expect("readable") == whole[at..end]);
            }
            cache.counters().direct_bytes
        });
        // The strided tensors of the byte-swapped sample bring their storage into the page cache.
        if dtype.starts_with("int") {
            assert_eq!(direct_bytes[0] > 0, direct_bytes[1] > 0, "{direct_bytes:?}");
        }
    }
}

#[test]
fn all_blocks_are_freed_with_the_virtual_file_and_the_counters_add_up() {
    let (_directory, path) = sharded();
    let reader = open(&path);
    evict(&reader);
    let cache = cache(64 << 20);
    let served = cache.open(reader);
    for at in (0..8 * MIB).step_by(100_000) {
        read(&served, at, 100_000).expect("readable");
    }
    let before = cache.counters();
    assert!(before.prefetched > 0 && before.held_bytes > 0, "{before:?}");
    cache.set_memory_limit(2 << 20);
    // A block in use goes when its read or answer is done, which four threads do.
    while cache.counters().held_bytes > 5 << 20 {
        std::thread::yield_now();
    }
    // Nothing is prefetched after this answer.
    read(&served, 0, 10).expect("readable");
    wait_until("the fills end", || cache.counters().held_bytes <= 2 << 20);
    drop(served);
    wait_until("the blocks are freed", || cache.counters().held_bytes == 0);
    let after = cache.counters();
    assert_eq!(after.prefetched, after.prefetch_used + after.prefetch_wasted, "{after:?}");
    assert_eq!(after.held_bytes, 0);
}

#[test]
fn a_block_is_read_once_for_all_its_waiters() {
    let (_directory, path) = sharded();
    let reader = open(&path);
    evict(&reader);
    let cache = cache(64 << 20);
    let served = cache.open(reader);
    let answers: Vec<Answered> = (0..16).map(|_| ask(&served, 2 * MIB + 5000, 300_000)).collect();
    let answers: Vec<_> =
        answers.iter().map(|messages| messages.recv().expect("an answer")).collect();
    assert!(answers.iter().all(|answer| answer.is_ok() && *answer == answers[0]));
    let counters = cache.counters();
    // At most the pages around it.
    let read = counters.direct_bytes + counters.buffered_bytes;
    assert!((300_000..310_000).contains(&read), "{counters:?}");
}

#[test]
fn a_small_jump_reads_its_own_range_and_no_block() {
    let (_directory, path) = sharded();
    let reader = open(&path);
    let whole = common::whole(&reader);
    evict(&reader);
    let cache = cache(64 << 20);
    let served = cache.open(reader);
    let at = 2 * MIB + 5000;
    let answer = ask(&served, at, 30_000).recv().expect("an answer");
    assert_eq!(answer.expect("bytes"), whole[at..at + 30_000]);
    let counters = cache.counters();
    assert!(counters.direct_bytes + counters.buffered_bytes < 40_000, "{counters:?}");
}

/// Integers of one byte become four bytes, and then eight.
#[test]
fn a_small_jump_in_a_cast_reads_what_its_block_is_made_of() {
    for (((_directory, path), steps, _), factor) in samples::cast_samples().zip([4, 8]) {
        let reader = open_cast(&path, &steps);
        let whole = common::whole(&reader);
        evict(&reader);
        let cache = cache(64 << 20);
        let served = cache.open(reader);
        let at = 2 * MIB + 5000;
        assert!(read(&served, at, 4096).expect("readable") == whole[at..at + 4096]);
        let counters = cache.counters();
        let read = counters.direct_bytes + counters.buffered_bytes;
        assert!(read <= (MIB / factor + 4096) as u64, "{counters:?}");
    }
}

#[test]
fn cached_sources_are_lent_and_not_copied() {
    let (directory, path) = sharded();
    let reader = open(&path);
    let whole = common::whole(&reader);
    let cache = cache(64 << 20);
    let served = cache.open(reader);
    let lent_bytes = || {
        let before = cache.counters().lent_bytes;
        for at in (0..whole.len()).step_by(MIB / 4) {
            let end = (at + MIB / 4).min(whole.len());
            assert!(read(&served, at, end - at).expect("readable") == whole[at..end]);
        }
        cache.counters().lent_bytes - before
    };
    let lent = lent_bytes();
    assert!(lent > whole.len() as u64 / 2, "{lent} of {}", whole.len());
    // What a program may write is copied.
    let writer = || {
        OpenOptions::new()
            .write(true)
            .open(directory.path().join("model-00002-of-00003.safetensors"))
    };
    let open = writer().expect("not kept waiting");
    let while_written = lent_bytes();
    assert!(while_written < lent, "{while_written} of {lent}");
    drop(open);
    assert_eq!(lent_bytes(), lent);
}

/// A change to a source while it is read.
fn changed_while_read(change: impl Fn(&Path)) {
    for memory in MEMORIES {
        for cold in [true, false] {
            let (directory, path) = sharded();
            let reader = open(&path);
            let whole = common::whole(&reader);
            if cold {
                evict(&reader);
            }
            let cache = cache(memory);
            let served = cache.open(reader);
            let victim = directory.path().join("model-00002-of-00003.safetensors");
            let changed = AtomicBool::new(false);
            std::thread::scope(|threads| {
                for asker in 0..ASKERS {
                    let (served, whole, changed) = (&served, &whole, &changed);
                    threads.spawn(move || {
                        let mut broken = false;
                        for (at, len) in ranges(asker, whole.len()).into_iter().cycle() {
                            let was_changed = changed.load(Ordering::Acquire);
                            let end = (at + len).min(whole.len());
                            match read(served, at, len) {
                                Ok(got) => {
                                    assert!(got == whole[at.min(end)..end]);
                                    assert!(!broken || got.is_empty(), "it stays broken");
                                }
                                Err(_) => broken = true,
                            }
                            if was_changed && broken {
                                break;
                            }
                        }
                    });
                }
                std::thread::sleep(Duration::from_millis(5));
                change(&victim);
                changed.store(true, Ordering::Release);
            });
            for (at, len) in ranges(77, whole.len()) {
                let answer = read(&served, at, len);
                assert!(answer.is_err() || at >= whole.len() || len == 0);
            }
            let counters = cache.counters();
            assert!(counters.errors >= counters.refused && counters.refused > 0, "{counters:?}");
        }
    }
}

#[test]
fn a_source_rewritten_in_place_is_an_error_for_good() {
    changed_while_read(|path| {
        let file = OpenOptions::new().write(true).open(path).expect("there");
        // Before the first write: two writes within a tick of the clock look like one.
        file.set_modified(SystemTime::now() + Duration::from_secs(5)).expect("set");
        let zeros = vec![0; file.metadata().expect("there").len() as usize];
        file.write_all_at(&zeros, 0).expect("written");
    });
}

#[test]
fn a_truncated_source_is_an_error_for_good() {
    changed_while_read(|path| {
        OpenOptions::new().write(true).open(path).expect("there").set_len(MIB as u64).expect("cut");
    });
}

#[test]
fn a_deleted_source_that_is_open_stays_readable() {
    let (directory, path) = sharded();
    let reader = open(&path);
    let whole = common::whole(&reader);
    evict(&reader);
    let cache = cache(4 << 20);
    let served = cache.open(reader);
    drop(directory);
    for (at, len) in ranges(3, whole.len()) {
        let end = (at + len).min(whole.len());
        assert!(read(&served, at, len).expect("readable") == whole[at.min(end)..end]);
    }
}

#[test]
fn every_read_is_answered_once_despite_drops_stops_and_panics() {
    for stop in [false, true] {
        let (_directory, path) = sharded();
        let reader = open(&path);
        let size = reader.virtual_file().size() as usize;
        evict(&reader);
        let cache = cache(4 << 20);
        let served = cache.open(reader);
        let answered = Arc::new(AtomicUsize::new(0));
        let (say, messages) = channel::<()>();
        let ranges = ranges(1, size);
        for (n, (at, len)) in ranges.iter().enumerate() {
            let (answered, say) = (Arc::clone(&answered), say.clone());
            let callback = Box::new(move |_: Result<&[u8], &ckptfs::cache::CacheError>| {
                answered.fetch_add(1, Ordering::Relaxed);
                drop(say);
                assert!(n % 10 != 3, "one in ten panics, which is meant to be");
            });
            served.read(*at as u64, *len as u32, callback);
        }
        if stop {
            cache.stop();
        }
        drop((say, served));
        let counters = cache.counters();
        drop(cache);
        assert!(messages.recv().is_err(), "all were called or dropped");
        assert_eq!(answered.load(Ordering::Relaxed), ranges.len(), "{counters:?}");
    }
}
