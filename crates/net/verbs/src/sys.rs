//! Bindings: structures and functions of libibverbs (1.1) and librdmacm (1.0), unchanged in the headers since rdma-core 17. Makes
//! no call; a test compares the sizes asserted below with the headers.
//!
//! Only used fields are named; the rest is kept as bytes of the right size.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// A C enum.
pub(crate) type CEnum = c_uint;

/// The front part of `struct ibv_device`.
#[repr(C)]
pub(crate) struct IbvDevice {
    ops: [*mut c_void; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    dev_name: [c_char; 64],
    dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

/// `IBV_TRANSPORT_IWARP`.
pub(crate) const TRANSPORT_IWARP: c_int = 1;

/// `struct ibv_context_ops`: verbs that the headers call through the context.
#[repr(C)]
pub(crate) struct IbvContextOps {
    compat1: [*mut c_void; 11],
    pub poll_cq: Option<unsafe extern "C" fn(*mut IbvCq, c_int, *mut IbvWc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut IbvCq, c_int) -> c_int>,
    compat2: [*mut c_void; 12],
    pub post_send: Option<unsafe extern "C" fn(*mut IbvQp, *mut IbvSendWr, *mut *mut IbvSendWr) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(*mut IbvQp, *mut IbvRecvWr, *mut *mut IbvRecvWr) -> c_int>,
    compat3: [*mut c_void; 5],
}

/// `struct ibv_context`.
#[repr(C)]
pub(crate) struct IbvContext {
    pub device: *mut IbvDevice,
    pub ops: IbvContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    mutex: libc::pthread_mutex_t,
    abi_compat: *mut c_void,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IbvDeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    rest: [c_int; 19],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IbvPortAttr {
    pub state: CEnum,
    pub max_mtu: CEnum,
    pub active_mtu: CEnum,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    bad_pkey_cntr: u32,
    qkey_viol_cntr: u32,
    pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    lmc: u8,
    max_vl_num: u8,
    sm_sl: u8,
    subnet_timeout: u8,
    init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    flags: u8,
    port_cap_flags2: u16,
}

/// `union ibv_gid`.
pub(crate) type IbvGid = [u8; 16];

/// `struct ibv_gid_entry`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvGidEntry {
    pub gid: IbvGid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// `struct ibv_pd`, only pointed to.
#[repr(C)]
pub(crate) struct IbvPd {
    pub context: *mut IbvContext,
    handle: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct IbvMr {
    pub context: *mut IbvContext,
    pub pd: *mut IbvPd,
    pub addr: *mut c_void,
    pub length: usize,
    handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(crate) struct IbvCompChannel {
    pub context: *mut IbvContext,
    pub fd: c_int,
    refcnt: c_int,
}

/// The front part of `struct ibv_cq`.
#[repr(C)]
pub(crate) struct IbvCq {
    pub context: *mut IbvContext,
    pub channel: *mut IbvCompChannel,
    cq_context: *mut c_void,
    handle: u32,
    pub cqe: c_int,
}

/// The front part of `struct ibv_qp`.
#[repr(C)]
pub(crate) struct IbvQp {
    pub context: *mut IbvContext,
    qp_context: *mut c_void,
    pd: *mut IbvPd,
    send_cq: *mut IbvCq,
    recv_cq: *mut IbvCq,
    srq: *mut c_void,
    handle: u32,
    pub qp_num: u32,
    state: CEnum,
    qp_type: CEnum,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvWc {
    pub wr_id: u64,
    pub status: CEnum,
    pub opcode: CEnum,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// In network byte order.
    pub imm_data: u32,
    pub qp_num: u32,
    src_qp: u32,
    pub wc_flags: c_uint,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvSge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_send_wr`, with the unions in the form for RDMA writes.
#[repr(C)]
pub(crate) struct IbvSendWr {
    pub wr_id: u64,
    pub next: *mut IbvSendWr,
    pub sg_list: *mut IbvSge,
    pub num_sge: c_int,
    pub opcode: CEnum,
    pub send_flags: c_uint,
    /// In network byte order.
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    unused: [u64; 9],
}

impl IbvSendWr {
    pub(crate) fn new(wr_id: u64, opcode: CEnum, send_flags: c_uint) -> Self {
        IbvSendWr {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode,
            send_flags,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            unused: [0; 9],
        }
    }
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub(crate) struct IbvRecvWr {
    pub wr_id: u64,
    pub next: *mut IbvRecvWr,
    pub sg_list: *mut IbvSge,
    pub num_sge: c_int,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvQpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct IbvQpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut IbvCq,
    pub recv_cq: *mut IbvCq,
    pub srq: *mut c_void,
    pub cap: IbvQpCap,
    pub qp_type: CEnum,
    pub sq_sig_all: c_int,
}

/// `struct ibv_qp_attr`: only the state, at the front, is ever set.
#[repr(C)]
pub(crate) struct IbvQpAttr {
    pub qp_state: CEnum,
    rest: [u32; 35],
}

impl IbvQpAttr {
    pub(crate) fn state(qp_state: CEnum) -> Self {
        IbvQpAttr { qp_state, rest: [0; 35] }
    }
}

/// `struct ibv_async_event`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IbvAsyncEvent {
    /// A pointer, or a port's number in the first four bytes.
    pub element: u64,
    pub event_type: CEnum,
}

/// `struct rdma_event_channel`.
#[repr(C)]
pub(crate) struct RdmaEventChannel {
    pub fd: c_int,
}

/// `struct rdma_cm_id`.
#[repr(C)]
pub(crate) struct RdmaCmId {
    pub verbs: *mut IbvContext,
    pub channel: *mut RdmaEventChannel,
    pub context: *mut c_void,
    pub qp: *mut IbvQp,
    /// `route.addr`: two socket addresses in 128 bytes each, then GIDs and a partition key.
    pub src_addr: [u64; 16],
    pub dst_addr: [u64; 16],
    pub sgid: IbvGid,
    pub dgid: IbvGid,
    pkey: u64,
    path_rec: *mut c_void,
    num_paths: u64,
    ps: CEnum,
    pub port_num: u8,
    event: *mut c_void,
    completion: [*mut c_void; 4],
    srq: *mut c_void,
    pub pd: *mut IbvPd,
    qp_type: CEnum,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RdmaConnParam {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

/// `struct rdma_cm_event`.
#[repr(C)]
pub(crate) struct RdmaCmEvent {
    pub id: *mut RdmaCmId,
    pub listen_id: *mut RdmaCmId,
    pub event: CEnum,
    pub status: c_int,
    pub conn: RdmaConnParam,
    ud_rest: [u64; 4],
}

/// `RDMA_MAX_RESP_RES` and `RDMA_MAX_INIT_DEPTH`: the most that both sides allow.
pub(crate) const MOST_READS: u8 = 0xff;
pub(crate) const PS_TCP: CEnum = 0x0106;
pub(crate) const QPT_RC: CEnum = 2;
pub(crate) const QPS_ERR: CEnum = 6;
pub(crate) const QP_STATE: c_int = 1;
pub(crate) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(crate) const ACCESS_REMOTE_WRITE: c_int = 2;
pub(crate) const ACCESS_REMOTE_READ: c_int = 4;
pub(crate) const WR_RDMA_WRITE: CEnum = 0;
pub(crate) const WR_RDMA_WRITE_WITH_IMM: CEnum = 1;
pub(crate) const WR_SEND: CEnum = 2;
pub(crate) const WR_RDMA_READ: CEnum = 4;
pub(crate) const SEND_SIGNALED: c_uint = 2;
pub(crate) const SEND_INLINE: c_uint = 8;
pub(crate) const WC_RECV: CEnum = 128;
pub(crate) const WC_WITH_IMM: c_uint = 2;
pub(crate) const PORT_ACTIVE: CEnum = 4;
pub(crate) const OPTION_ID: c_int = 0;
pub(crate) const OPTION_ID_ACK_TIMEOUT: c_int = 3;
pub(crate) const OPTION_ID_REUSEADDR: c_int = 1;
pub(crate) const OPTION_ID_AFONLY: c_int = 2;

/// Size of each structure that C code reads or writes, by name in the headers.
pub(crate) const SIZES: &[(&str, usize)] = &[
    ("ibv_device", size_of::<IbvDevice>()),
    ("ibv_context_ops", size_of::<IbvContextOps>()),
    ("ibv_context", size_of::<IbvContext>()),
    ("ibv_device_attr", size_of::<IbvDeviceAttr>()),
    ("ibv_port_attr", size_of::<IbvPortAttr>()),
    ("ibv_gid_entry", size_of::<IbvGidEntry>()),
    ("ibv_mr", size_of::<IbvMr>()),
    ("ibv_comp_channel", size_of::<IbvCompChannel>()),
    ("ibv_wc", size_of::<IbvWc>()),
    ("ibv_sge", size_of::<IbvSge>()),
    ("ibv_send_wr", size_of::<IbvSendWr>()),
    ("ibv_recv_wr", size_of::<IbvRecvWr>()),
    ("ibv_qp_cap", size_of::<IbvQpCap>()),
    ("ibv_qp_init_attr", size_of::<IbvQpInitAttr>()),
    ("ibv_qp_attr", size_of::<IbvQpAttr>()),
    ("ibv_async_event", size_of::<IbvAsyncEvent>()),
    ("rdma_event_channel", size_of::<RdmaEventChannel>()),
    ("rdma_cm_id", size_of::<RdmaCmId>()),
    ("rdma_conn_param", size_of::<RdmaConnParam>()),
    ("rdma_cm_event", size_of::<RdmaCmEvent>()),
];

macro_rules! offsets {
    ($($c:literal $C:ident { $($cf:literal $f:ident),+ $(,)? })+) => {
        /// Offset of each used field, by structure and field name in the headers.
        pub(crate) const OFFSETS: &[(&str, &str, usize)] =
            &[$($(($c, $cf, std::mem::offset_of!($C, $f))),+),+];
    };
}

offsets! {
    "ibv_device" IbvDevice { "node_type" node_type, "transport_type" transport_type, "name" name, "ibdev_path" ibdev_path }
    "ibv_context_ops" IbvContextOps {
        "poll_cq" poll_cq, "req_notify_cq" req_notify_cq, "post_send" post_send, "post_recv" post_recv,
    }
    "ibv_context" IbvContext { "device" device, "ops" ops, "async_fd" async_fd, "num_comp_vectors" num_comp_vectors }
    "ibv_device_attr" IbvDeviceAttr {
        "node_guid" node_guid, "vendor_id" vendor_id, "max_qp" max_qp, "max_qp_wr" max_qp_wr, "max_sge" max_sge,
        "max_cqe" max_cqe, "max_pd" max_pd,
        "max_qp_rd_atom" max_qp_rd_atom, "max_pkeys" max_pkeys, "phys_port_cnt" phys_port_cnt,
    }
    "ibv_port_attr" IbvPortAttr {
        "state" state, "active_mtu" active_mtu, "gid_tbl_len" gid_tbl_len, "max_msg_sz" max_msg_sz, "lid" lid,
        "sm_lid" sm_lid, "active_width" active_width, "active_speed" active_speed, "phys_state" phys_state,
        "link_layer" link_layer,
    }
    "ibv_gid_entry" IbvGidEntry {
        "gid" gid, "gid_index" gid_index, "port_num" port_num, "gid_type" gid_type, "ndev_ifindex" ndev_ifindex,
    }
    "ibv_pd" IbvPd { "context" context }
    "ibv_mr" IbvMr { "addr" addr, "length" length, "lkey" lkey, "rkey" rkey }
    "ibv_comp_channel" IbvCompChannel { "fd" fd }
    "ibv_cq" IbvCq { "context" context, "channel" channel, "cqe" cqe }
    "ibv_qp" IbvQp { "context" context, "qp_num" qp_num }
    "ibv_wc" IbvWc {
        "wr_id" wr_id, "status" status, "opcode" opcode, "vendor_err" vendor_err, "byte_len" byte_len,
        "imm_data" imm_data, "qp_num" qp_num, "wc_flags" wc_flags,
    }
    "ibv_sge" IbvSge { "addr" addr, "length" length, "lkey" lkey }
    "ibv_send_wr" IbvSendWr {
        "wr_id" wr_id, "next" next, "sg_list" sg_list, "num_sge" num_sge, "opcode" opcode, "send_flags" send_flags,
        "imm_data" imm_data, "wr.rdma.remote_addr" remote_addr, "wr.rdma.rkey" rkey,
    }
    "ibv_recv_wr" IbvRecvWr { "wr_id" wr_id, "next" next, "sg_list" sg_list, "num_sge" num_sge }
    "ibv_qp_cap" IbvQpCap { "max_send_wr" max_send_wr, "max_recv_wr" max_recv_wr, "max_inline_data" max_inline_data }
    "ibv_qp_init_attr" IbvQpInitAttr {
        "send_cq" send_cq, "recv_cq" recv_cq, "srq" srq, "cap" cap, "qp_type" qp_type, "sq_sig_all" sq_sig_all,
    }
    "ibv_qp_attr" IbvQpAttr { "qp_state" qp_state }
    "ibv_async_event" IbvAsyncEvent { "element" element, "event_type" event_type }
    "rdma_event_channel" RdmaEventChannel { "fd" fd }
    "rdma_cm_id" RdmaCmId {
        "verbs" verbs, "channel" channel, "context" context, "qp" qp, "route.addr.src_addr" src_addr,
        "route.addr.dst_addr" dst_addr, "route.addr.addr.ibaddr.sgid" sgid, "route.addr.addr.ibaddr.dgid" dgid,
        "port_num" port_num, "pd" pd,
    }
    "rdma_conn_param" RdmaConnParam {
        "private_data" private_data, "private_data_len" private_data_len, "responder_resources" responder_resources,
        "initiator_depth" initiator_depth, "flow_control" flow_control, "retry_count" retry_count,
        "rnr_retry_count" rnr_retry_count, "srq" srq, "qp_num" qp_num,
    }
    "rdma_cm_event" RdmaCmEvent {
        "id" id, "listen_id" listen_id, "event" event, "status" status, "param.conn" conn,
    }
}

// Sizes of the C structures on 64-bit Linux; a test compares these with the headers where installed.
const _: () = {
    assert!(size_of::<IbvContextOps>() == 256 && size_of::<IbvDevice>() == 664);
    assert!(size_of::<IbvDeviceAttr>() == 232 && size_of::<IbvPortAttr>() == 52 && size_of::<IbvGidEntry>() == 32);
    assert!(size_of::<IbvWc>() == 48 && size_of::<IbvSendWr>() == 128 && size_of::<IbvRecvWr>() == 32);
    assert!(size_of::<IbvQpInitAttr>() == 64 && size_of::<IbvQpAttr>() == 144 && size_of::<IbvAsyncEvent>() == 16);
    assert!(size_of::<RdmaCmId>() == 416 && size_of::<RdmaConnParam>() == 24 && size_of::<RdmaCmEvent>() == 80);
};

macro_rules! functions {
    ($(#[$doc:meta])* $Lib:ident { $( $name:ident : fn($($arg:ty),*) $(-> $ret:ty)? ;)+ } optional { $( $oname:ident : fn($($oarg:ty),*) $(-> $oret:ty)? ;)* }) => {
        $(#[$doc])*
        pub(crate) struct $Lib {
            $( pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?, )+
            $( pub $oname: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>, )*
        }
        impl $Lib {
            /// Resolves all functions with `find`.
            ///
            /// # Safety
            /// `find` returns the address of the function with that name and the type given here.
            pub(crate) unsafe fn resolve(find: impl Fn(&'static str) -> Option<*mut c_void>) -> Result<Self, &'static str> {
                Ok($Lib {
                    $( $name: {
                        let found = find(stringify!($name)).ok_or(stringify!($name))?;
                        // SAFETY: the caller guarantees that the pointer is this function; a function pointer has a data
                        // pointer's size.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(found) }
                    }, )+
                    $( $oname: find(stringify!($oname)).map(|found| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($oarg),*) $(-> $oret)?>(found) }
                    }), )*
                })
            }
        }
    };
}

functions! {
    /// Functions of libibverbs.
    Ibverbs {
        ibv_get_device_list: fn(*mut c_int) -> *mut *mut IbvDevice;
        ibv_free_device_list: fn(*mut *mut IbvDevice);
        ibv_open_device: fn(*mut IbvDevice) -> *mut IbvContext;
        ibv_close_device: fn(*mut IbvContext) -> c_int;
        ibv_query_device: fn(*mut IbvContext, *mut IbvDeviceAttr) -> c_int;
        ibv_query_port: fn(*mut IbvContext, u8, *mut IbvPortAttr) -> c_int;
        ibv_query_gid: fn(*mut IbvContext, u8, c_int, *mut IbvGid) -> c_int;
        ibv_alloc_pd: fn(*mut IbvContext) -> *mut IbvPd;
        ibv_dealloc_pd: fn(*mut IbvPd) -> c_int;
        ibv_reg_mr: fn(*mut IbvPd, *mut c_void, usize, c_int) -> *mut IbvMr;
        ibv_dereg_mr: fn(*mut IbvMr) -> c_int;
        ibv_create_comp_channel: fn(*mut IbvContext) -> *mut IbvCompChannel;
        ibv_destroy_comp_channel: fn(*mut IbvCompChannel) -> c_int;
        ibv_create_cq: fn(*mut IbvContext, c_int, *mut c_void, *mut IbvCompChannel, c_int) -> *mut IbvCq;
        ibv_destroy_cq: fn(*mut IbvCq) -> c_int;
        ibv_get_cq_event: fn(*mut IbvCompChannel, *mut *mut IbvCq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut IbvCq, c_uint);
        ibv_modify_qp: fn(*mut IbvQp, *mut IbvQpAttr, c_int) -> c_int;
        ibv_get_async_event: fn(*mut IbvContext, *mut IbvAsyncEvent) -> c_int;
        ibv_ack_async_event: fn(*mut IbvAsyncEvent);
    }
    optional {
        _ibv_query_gid_ex: fn(*mut IbvContext, u32, u32, *mut IbvGidEntry, u32, usize) -> c_int;
    }
}

functions! {
    /// Functions of librdmacm.
    Rdmacm {
        rdma_create_event_channel: fn() -> *mut RdmaEventChannel;
        rdma_destroy_event_channel: fn(*mut RdmaEventChannel);
        rdma_create_id: fn(*mut RdmaEventChannel, *mut *mut RdmaCmId, *mut c_void, CEnum) -> c_int;
        rdma_destroy_id: fn(*mut RdmaCmId) -> c_int;
        rdma_bind_addr: fn(*mut RdmaCmId, *mut libc::sockaddr) -> c_int;
        rdma_resolve_addr: fn(*mut RdmaCmId, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        rdma_resolve_route: fn(*mut RdmaCmId, c_int) -> c_int;
        rdma_create_qp: fn(*mut RdmaCmId, *mut IbvPd, *mut IbvQpInitAttr) -> c_int;
        rdma_destroy_qp: fn(*mut RdmaCmId);
        rdma_connect: fn(*mut RdmaCmId, *mut RdmaConnParam) -> c_int;
        rdma_listen: fn(*mut RdmaCmId, c_int) -> c_int;
        rdma_accept: fn(*mut RdmaCmId, *mut RdmaConnParam) -> c_int;
        rdma_reject: fn(*mut RdmaCmId, *const c_void, u8) -> c_int;
        rdma_disconnect: fn(*mut RdmaCmId) -> c_int;
        rdma_get_cm_event: fn(*mut RdmaEventChannel, *mut *mut RdmaCmEvent) -> c_int;
        rdma_ack_cm_event: fn(*mut RdmaCmEvent) -> c_int;
        rdma_get_src_port: fn(*mut RdmaCmId) -> u16;
    }
    optional {
        rdma_get_devices: fn(*mut c_int) -> *mut *mut IbvContext;
        rdma_free_devices: fn(*mut *mut IbvContext);
        rdma_set_option: fn(*mut RdmaCmId, c_int, c_int, *mut c_void, usize) -> c_int;
    }
}
