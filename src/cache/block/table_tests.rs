//! Tests of the ranges that blocks hold, of fills and of evictions.

use proptest::prelude::*;

use crate::cache::CacheError;
use crate::cache::block::reply::PendingReply;

use super::*;

const MIB: u64 = 1 << 20;

fn range(bytes: Range<u64>) -> SourceRange {
    let block_bounds = bytes.clone();
    SourceRange { source: BlockSource::File(0), bytes, reply_offset: 0, block_bounds }
}

#[test]
fn making_room_evicts_the_blocks_of_one_slab_and_no_more() {
    let table = BlockTable::new(160 * MIB, Arc::default());
    let mut buffers: Vec<Buffer> =
        (0..150).map(|_| table.take_buffer(BufferSize::Small).unwrap()).collect();
    for n in 0..150 {
        // Blocks become ready in an order that has nothing to do with their slabs.
        let buffer = buffers.swap_remove(n * 37 % buffers.len());
        let bytes = n as u64 * MIB..(n as u64 + 1) * MIB;
        let [id] = *table.reserve(1, &[range(bytes)]) else { panic!() };
        assert!(table.claim(id));
        table.complete(id, Some(&Arc::new(Block::new(buffer, 0..MIB as usize))));
    }
    let ready = || table.lock().ready.len();
    assert_eq!(ready(), 150);
    table.set_memory_limit(160 * MIB - 1);
    assert_eq!(ready(), 135);
    let large = [(); 2].map(|()| table.take_buffer(BufferSize::Large).unwrap());
    assert_eq!(ready(), 120);
    assert!(table.held_and_limit().0 < 160 * MIB);
    drop(large);
    table.remove_file(1);
    assert_eq!(table.held_and_limit().0, 0);
    assert_eq!(table.reserve(1, &[]), []);
}

#[test]
fn blocks_of_tensors_are_used_up_with_their_last_byte_and_of_files_shortly_before() {
    const SIZE: BufferSize = BufferSize::Large;
    const LEN: u64 = SIZE.bytes() as u64;
    for (source, unread, is_used_up) in [
        (BlockSource::File(0), LEN / 16, true),
        (BlockSource::File(0), LEN / 16 + 1, false),
        (BlockSource::Tensor(0), 1, false),
        (BlockSource::Tensor(0), 0, true),
    ] {
        let table = BlockTable::new(LEN, Arc::default());
        let part = |bytes| SourceRange { source, ..range(bytes) };
        let [id] = *table.reserve(1, &[part(0..LEN)]) else { panic!() };
        let buffer = table.take_unneeded_buffer(SIZE).unwrap();
        assert!(table.claim(id));
        table.complete(id, Some(&Arc::new(Block::new(buffer, 0..SIZE.bytes()))));
        assert!(table.lookup(1, &[part(0..LEN - unread)]).is_some());
        let unneeded = table.take_unneeded_buffer(SIZE);
        assert_eq!(unneeded.is_some(), is_used_up, "{source:?} {unread}");
        drop(unneeded);
        assert!(table.take_buffer(SIZE).is_some());
    }
}

#[test]
fn a_block_requested_deferred_and_then_blocking_is_filled_for_both_by_the_first_job() {
    let table = BlockTable::new(16 * MIB, Arc::default());
    let (sender, replies) = std::sync::mpsc::channel();
    let join = |priority| {
        let sender = sender.clone();
        let callback = Box::new(move |reply: Result<&[u8], &CacheError>| {
            sender.send(reply.is_ok()).unwrap();
        });
        let reply = PendingReply::new(callback, Arc::default());
        let waiter = |parts: BlockParts| Some(vec![(parts[0].0, Waiter::Direct(0..1, reply))]);
        let joined = table.join(1, &[range(0..MIB)], priority, waiter).unwrap();
        assert!(joined.ready.is_empty());
        joined.to_fill
    };
    let [id] = *join(FillPriority::Deferred) else { panic!() };
    assert_eq!(join(FillPriority::Deferred), []);
    assert_eq!(join(FillPriority::Blocking), [id]);
    assert_eq!(join(FillPriority::Blocking), []);
    assert!(table.claim(id) && !table.claim(id));
    assert_eq!(join(FillPriority::Blocking), []);
    let buffer = table.take_buffer(BufferSize::Small).unwrap();
    let block = Arc::new(Block::new(buffer, 0..MIB as usize));
    let waiters = table.complete(id, Some(&block));
    waiters.into_iter().for_each(|waiter| waiter.answer(Ok(block.bytes())));
    drop(sender);
    assert_eq!(replies.iter().collect::<Vec<_>>(), [true; 5]);
}

fn range_of(file: u32, bytes: Range<u64>, block_bounds: Range<u64>) -> SourceRange {
    SourceRange { source: BlockSource::File(file), bytes, reply_offset: 0, block_bounds }
}

#[test]
fn held_bytes_are_reused_and_the_rest_gets_new_blocks() {
    let mut index = ExtentIndex::default();
    let spans = |blocks: &[BlockId]| -> Vec<_> {
        blocks.iter().map(|block| block.start..block.end).collect()
    };
    let new = index.insert_missing(1, &[range_of(0, 10..20, 10..20)]);
    let first = 10..20;
    assert_eq!(spans(&new), [first]);
    // Up to the bounds, and no byte twice.
    let read = [range_of(0, 5..25, 0..40)];
    let new = index.insert_missing(1, &read);
    assert_eq!(spans(&new), [0..10, 20..40]);
    assert!(index.lookup(1, &read, 2).is_none());
    let parts = index.lookup(1, &read, 3).unwrap();
    let parts: Vec<_> = parts
        .iter()
        .flat_map(|(_, parts)| parts)
        .map(|part| (part.reply_offset, part.bytes.clone()))
        .collect();
    assert_eq!(parts, [(0, 5..10), (5, 0..10), (15, 0..5)]);
    // Nothing of another virtual file, or of another source.
    assert!(index.lookup(1, &[range_of(0, 0..40, 0..40)], 9).is_some());
    assert!(index.lookup(2, &[range_of(0, 0..40, 0..40)], 9).is_none());
    assert!(index.lookup(1, &[range_of(1, 0..1, 0..1)], 9).is_none());
    index.remove(new[0]);
    assert_eq!(index.overlapping(1, &range_of(0, 0..21, 0..21)).count(), 2);
    assert!(index.lookup(1, &[range_of(0, 9..11, 0..40)], 9).is_none());
}

proptest! {
    #[test]
    fn each_requested_byte_lies_in_one_block(
        reads in prop::collection::vec((0u64..1000, 1u64..100, 0u64..50, 0u64..50, 0usize..3), 1..60),
    ) {
        let mut index = ExtentIndex::default();
        let mut all: Vec<BlockId> = Vec::new();
        for (start, len, before, after, removed) in reads {
            let bytes = start..start + len;
            let bounds = start.saturating_sub(before)..start + len + after;
            let read = [range_of(0, bytes.clone(), bounds.clone())];
            let new = index.insert_missing(7, &read);
            let parts = index.lookup(7, &read, 1000).unwrap();
            prop_assert!(new.iter().all(|n| n.start >= bounds.start && n.end <= bounds.end));
            all.extend(&new);
            all.sort();
            prop_assert!(all.windows(2).all(|two| two[0].end <= two[1].start), "{all:?}");
            let mut at = 0;
            for (block, parts) in &parts {
                prop_assert!(all.contains(block));
                for part in parts {
                    prop_assert_eq!(part.reply_offset, at);
                    prop_assert_eq!(block.start + part.bytes.start as u64, start + at as u64);
                    prop_assert!(block.start + part.bytes.end as u64 <= block.end);
                    at += part.bytes.len();
                }
            }
            prop_assert_eq!(at as u64, len);
            prop_assert_eq!(index.insert_missing(7, &read), []);
            for _ in 0..removed.min(all.len()) {
                index.remove(all.remove(all.len() / 2));
            }
        }
    }
}
