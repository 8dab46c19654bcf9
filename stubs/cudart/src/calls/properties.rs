//! The properties of a device, as the C struct that programs read. They come from the driver's attributes. Those that
//! matter only to kernels, such as the sizes of textures, are 0.

use std::ffi::c_char;

use super::query;
use crate::codes::Code;
use crate::driver;

/// `cudaDeviceProp` of CUDA 13.
#[repr(C)]
pub struct Properties {
    name: [c_char; 256],
    uuid: [u8; 16],
    luid: [u8; 8],
    luid_node_mask: u32,
    memory: usize,
    shared_memory_per_block: usize,
    registers_per_block: i32,
    warp: i32,
    pitch: usize,
    threads_per_block: i32,
    block: [i32; 3],
    grid: [i32; 3],
    constant_memory: usize,
    major: i32,
    minor: i32,
    texture_alignment: usize,
    texture_pitch_alignment: usize,
    multiprocessors: i32,
    integrated: i32,
    can_map_host_memory: i32,
    textures_and_surfaces: [i32; 39],
    surface_alignment: usize,
    concurrent_kernels: i32,
    ecc: i32,
    pci_bus: i32,
    pci_device: i32,
    pci_domain: i32,
    tcc: i32,
    async_engines: i32,
    unified_addressing: i32,
    bus_width: i32,
    l2_cache: i32,
    persisting_l2_cache: i32,
    threads_per_multiprocessor: i32,
    stream_priorities: i32,
    global_l1_cache: i32,
    local_l1_cache: i32,
    shared_memory_per_multiprocessor: usize,
    registers_per_multiprocessor: i32,
    managed_memory: i32,
    multi_gpu_board: i32,
    multi_gpu_board_group: i32,
    host_native_atomics: i32,
    pageable_memory_access: i32,
    concurrent_managed_access: i32,
    compute_preemption: i32,
    host_pointer_for_registered_memory: i32,
    cooperative_launch: i32,
    shared_memory_per_block_optin: usize,
    host_page_tables: i32,
    direct_managed_access_from_host: i32,
    blocks_per_multiprocessor: i32,
    access_policy_window: i32,
    reserved_shared_memory_per_block: usize,
    host_register: i32,
    sparse_arrays: i32,
    host_register_read_only: i32,
    timeline_semaphores: i32,
    memory_pools: i32,
    gpu_direct_rdma: i32,
    gpu_direct_rdma_flush: u32,
    gpu_direct_rdma_ordering: i32,
    memory_pool_handles: u32,
    deferred_mapping: i32,
    ipc_events: i32,
    cluster_launch: i32,
    unified_function_pointers: i32,
    numa_config: i32,
    numa: i32,
    mps: i32,
    host_numa: i32,
    gpu_pci_device: u32,
    gpu_pci_subsystem: u32,
    host_numa_multinode_ipc: i32,
    reserved: [i32; 56],
}

impl Properties {
    /// The properties of a device.
    pub fn of(device: i32) -> Result<Properties, Code> {
        // SAFETY: all of it is numbers, and 0 is one.
        let mut all: Properties = unsafe { std::mem::zeroed() };
        driver::cuDeviceGetName(all.name.as_mut_ptr(), all.name.len() as i32, device)?;
        driver::cuDeviceGetUuid_v2(&mut all.uuid, device)?;
        driver::cuDeviceTotalMem_v2(&mut all.memory, device)?;
        let ask = |number| query(|value| driver::cuDeviceGetAttribute(value, number, device));
        for (place, number) in all.numbers() {
            *place = ask(number)?;
        }
        for (place, number) in all.sizes() {
            *place = ask(number)? as usize;
        }
        Ok(all)
    }

    /// The fields for attributes, each with the attribute's number.
    fn numbers(&mut self) -> [(&mut i32, i32); 43] {
        let [block_x, block_y, block_z] = &mut self.block;
        let [grid_x, grid_y, grid_z] = &mut self.grid;
        [
            (&mut self.threads_per_block, 1),
            (block_x, 2),
            (block_y, 3),
            (block_z, 4),
            (grid_x, 5),
            (grid_y, 6),
            (grid_z, 7),
            (&mut self.warp, 10),
            (&mut self.registers_per_block, 12),
            (&mut self.multiprocessors, 16),
            (&mut self.integrated, 18),
            (&mut self.can_map_host_memory, 19),
            (&mut self.concurrent_kernels, 31),
            (&mut self.ecc, 32),
            (&mut self.pci_bus, 33),
            (&mut self.pci_device, 34),
            (&mut self.bus_width, 37),
            (&mut self.l2_cache, 38),
            (&mut self.threads_per_multiprocessor, 39),
            (&mut self.async_engines, 40),
            (&mut self.unified_addressing, 41),
            (&mut self.pci_domain, 50),
            (&mut self.major, 75),
            (&mut self.minor, 76),
            (&mut self.stream_priorities, 78),
            (&mut self.global_l1_cache, 79),
            (&mut self.local_l1_cache, 80),
            (&mut self.registers_per_multiprocessor, 82),
            (&mut self.managed_memory, 83),
            (&mut self.multi_gpu_board, 84),
            (&mut self.pageable_memory_access, 88),
            (&mut self.concurrent_managed_access, 89),
            (&mut self.host_pointer_for_registered_memory, 91),
            (&mut self.cooperative_launch, 95),
            (&mut self.host_register, 99),
            (&mut self.host_page_tables, 100),
            (&mut self.direct_managed_access_from_host, 101),
            (&mut self.blocks_per_multiprocessor, 106),
            (&mut self.host_register_read_only, 113),
            (&mut self.memory_pools, 115),
            (&mut self.gpu_direct_rdma, 116),
            (&mut self.numa, 131),
            (&mut self.host_numa, 134),
        ]
    }

    fn sizes(&mut self) -> [(&mut usize, i32); 5] {
        [
            (&mut self.shared_memory_per_block, 8),
            (&mut self.constant_memory, 9),
            (&mut self.pitch, 11),
            (&mut self.shared_memory_per_multiprocessor, 81),
            (&mut self.shared_memory_per_block_optin, 97),
        ]
    }
}
