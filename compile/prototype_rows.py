"""Rows of the operator table: what each GE operator type we emit takes and gives, where it runs and how we know.

A row with `ins` is complete. A row without is a basic operator: its inputs, outputs and attributes are read from the
helper that torchair ships for it (`prototypes.read_helper`), and the row only adds what the helper does not say.

Notation, one port group a line: `names: dtypes`; `name?` is optional, `name[]` a list of any length; dtypes are short
names or GE's named groups (`prototypes.DTYPES`, `GROUPS`) joined by `/`. Attributes: `name: Type` is required,
`name: Type = default` is not. `same` lists groups of ports that share one dtype; `more` and `attrs` add to what the
helper says.
`layouts` says in which layouts an input may lie, by its dtype; what it does not name is taken as ND, and only so.
An output with the name of an input is written in place: that is GE's own rule for reference operators.

8-bit and 4-bit floats exist on the 950 family only and are taken away elsewhere, whatever a row says.

Sources are named in words: `registration` is the operator's REG_OP or OpDef in the public ops-transformer (July 2026),
ops-nn, ops-math or ge (August 2026) repositories.
"""

from dataclasses import dataclass

EVERY = "a2 a3 950"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operator type.

    Attributes:
        ins, outs, attrs, same, more: see the module's notation.
        socs: families with a kernel.
        layouts: `name dtypes: layouts` a line, see the notation.
        since: first CANN release that has it, "" where not established; `"9.1 950"` is of that family alone.
        provider: "builtin" (CANN's), "ge" (structure of a graph), "vllm-ascend" (its operator package), "own" (a kernel
            of this project).
        source: where the row is from.
        ran: where it has run on devices, in words; "" where no public word of it was found.
    """

    type: str
    ins: str | None = None
    outs: str | None = None
    attrs: str = ""
    same: str = ""
    more: str = ""
    layouts: str = ""
    socs: str = EVERY
    since: str = ""
    provider: str = "builtin"
    source: str
    ran: str = ""

    @property
    def evidence(self) -> str:
        """How it is known to work on a device."""
        if self.ran:
            return f"ran: {self.ran}"
        return "never run" if self.provider == "own" else "documented"


_STRUCTURE = "registration in ge"

STRUCTURE = [
    Row(type="Data", ins="x?: ALL", outs="y: ALL", attrs="index: Int = 0", provider="ge", source=_STRUCTURE),
    Row(type="RefData", ins="x?: ALL", outs="y: ALL", attrs="index: Int = 0", provider="ge", source=_STRUCTURE),
    Row(type="Const", ins="", outs="y: ALL", attrs="value: Tensor", provider="ge", source=_STRUCTURE),
    Row(
        type="FileConstant",
        ins="",
        outs="y: ALL",
        attrs="""
            shape: ListInt
            dtype: Type
            file_path: String = ""
            file_id: String = ""
            location: String = ""
            offset: Int = 0
            length: Int = 0
        """,
        provider="ge",
        source=_STRUCTURE + "; location, offset and length are attributes that its loader reads before file_path",
    ),
    Row(
        type="NetOutput",
        ins="input[]: ALL",
        outs="",
        provider="ge",
        source=_STRUCTURE + "; names as torchair gives them",
    ),
]


_MATH = "registration in ops-math"
_NN = "registration in ops-nn"
_BOTH = "torchair's helper, and the registration in ops-math"
_PLAIN = "torchair's helper"
_HCOM = "torchair's helper; BF16 is in GE's type map of collectives, not in the registration"


def _basic(types: str, same: str = "", more: str = "", attrs: str = "", source: str = _PLAIN) -> list[Row]:
    return [Row(type=t, same=same, more=more, attrs=attrs, source=source) for t in types.split()]


# Older helpers miss dtypes that the public registrations of 2026 have; BF16 above all.
BASIC = [
    *_basic("Add Sub RealDiv FloorDiv", same="x1 x2 y"),
    *_basic("Maximum Minimum Mod FloorMod", same="x1 x2 y", more="x1 x2 y: BF16", source=_BOTH),
    # Their helpers name symbols without dtypes. GE would promote mixed dtypes; older kernels do not, so we never mix.
    *_basic("Mul Pow", same="x1 x2 y", more="x1 x2 y: F64/F32/F16/BF16/I8/I16/I32/I64/U8", source=_BOTH),
    *_basic("Equal NotEqual Less LessEqual Greater GreaterEqual", same="x1 x2"),
    *_basic("LogicalAnd LogicalOr LogicalNot"),
    *_basic("Neg Exp Log Sigmoid Tanh Rsqrt Sqrt Reciprocal Square Swish Abs", same="x y"),
    *_basic("GeluV2", same="x y", more="x y: F32/F16/BF16", source=_BOTH),
    *_basic(
        "LayerNormV4",
        same="x y; gamma beta; mean rstd",
        more="x y gamma beta: F32/F16/BF16\nnormalized_shape: INDEX\nmean rstd: F32",
        source=_BOTH,
    ),
    *_basic("PadV3", same="x constant_values y"),
    *_basic("SoftplusV2", same="x y", more="x y: BF16", source="torchair's helper, and the registration in ops-nn"),
    *_basic("ReduceSum ReduceMax ReduceMean Cumsum", same="x y"),
    *_basic("Identity ExpandDims", same="x y", more="x y: ALL", source=_BOTH),
    *_basic("TensorMove", same="x y", more="x y: BF16/F64/I16/U16/HIF8/E5M2/E4M3", source=_BOTH),
    *_basic("Reshape Squeeze Unsqueeze Transpose Slice Tile StridedSlice StridedSliceV2 BroadcastTo", same="x y"),
    *_basic("ConcatD", same="x y", more="x y: BOOL", source=_BOTH),
    *_basic("ConcatV2", same="x y", more="x y: E4M3", source=_BOTH),
    *_basic("Concat Pack", same="x y"),
    *_basic("Split", same="x y", more="x y: BOOL", source=_BOTH),
    *_basic("SplitV", same="x y", more="x y: BOOL\nsplit_dim: I64", source=_BOTH),
    *_basic("SplitD SplitVD", same="x y", more="x y: BF16/BOOL", source=_BOTH),
    *_basic("Select", same="x1 x2 y"),
    *_basic("SelectV2", same="then else result", more="then else result: BOOL", source=_BOTH),
    *_basic("Gather GatherV2 GatherElements", same="x y"),
    *_basic(
        "TopKV2",
        same="x values",
        more="k indices: I64",
        attrs="sort_policy: Int = 1; indices_dtype: Int = 3",  # the helper writes the first and documents neither
        source=_BOTH,
    ),
    *_basic("Sort", same="x y1", more="x y1: BF16", source=_BOTH),
    *_basic("Cast", more="x y: HIF8/E5M2/E4M3", source=_BOTH),
    # Its registration lists neither: torchair makes it of every `view` to another dtype, and of 8-bit floats itself.
    *_basic("Bitcast", more="x y: BF16/E4M3", source="torchair's helper, and its converters; ge runs it as Reshape"),
    *_basic("Fill Range Shape ZerosLike OnesLike SoftmaxV2 BatchMatMulV2 MatMulV2"),
    *_basic("MatMul BatchMatMul", same="x1 x2 y"),
    *_basic("HcomAllGather", same="x y", more="x y: BF16", source="torchair's helper, and the registration in hccl"),
    *_basic("HcomAllReduce HcomReduceScatter HcomAllToAll", same="x y", more="x y: BF16", source=_HCOM),
    *_basic("HcomAllToAllV", same="send_data recv_data", more="send_data recv_data: BF16", source=_HCOM),
    # Complete rows although helpers exist: what is written in place must be known without torchair too.
    Row(
        type="Assign",
        ins="ref value: BASIC/BOOL/STR",
        outs="ref: BASIC/BOOL/STR",
        attrs="validate_shape: Bool = true; use_locking: Bool = false",
        same="ref value",
        source=_MATH,
    ),
    Row(
        type="ScatterNdUpdate",
        ins="var: BASIC/BOOL/E5M2/E4M3/HIF8; indices: INDEX; updates: BASIC/BOOL/E5M2/E4M3/HIF8",
        outs="var: BASIC/BOOL/E5M2/E4M3/HIF8",
        attrs="use_locking: Bool = false",
        same="var updates",
        source=_NN,
    ),
]


_NARROW = "HIF8/E5M2/E4M3"
_QKV = f"I8/F16/BF16/{_NARROW}"
_KV = f"{_QKV}/E2M1/E1M2/I4"
_CACHE = f"F16/BF16/F32/I8/U8/I16/U16/I32/U32/{_NARROW}/E2M1/E1M2"
_INT64_MAX = 2**63 - 1
_TRANSFORMER = "registration in ops-transformer, fact sheet of Ascend, appendix 1"

# Fact sheets of Ascend, A.3, and of serving, section 6.
_RECIPE = "on 950, in the K3 recipe of cann-recipes-infer"
_DSA = "in the DSA backend of vllm-ascend, called one by one"
_GDN = "in the GDN layers of vllm-ascend, with one decay for a head, called one by one"

_PAIR = """group_ep: String
            ep_world_size: Int
            ep_rank_id: Int
            moe_expert_num: Int
            group_tp: String = ""
            tp_world_size: Int = 0
            tp_rank_id: Int = 0
            expert_shard_type: Int = 0"""

FUSED = [
    Row(
        type="RmsNorm",
        ins="x gamma: F32/F16/BF16",
        outs="y: F32/F16/BF16; rstd: F32",
        attrs="epsilon: Float = 1e-6",
        same="x y",
        source=_NN,
    ),
    Row(
        type="AddRmsNorm",
        ins="x1 x2 gamma: F32/F16/BF16",
        outs="y: F32/F16/BF16; rstd: F32; x: F32/F16/BF16",
        attrs="epsilon: Float = 1e-6",
        same="x1 x2 gamma y x",
        source=_NN,
    ),
    Row(
        type="SwiGlu",
        ins="x: F32/F16/BF16",
        outs="y: F32/F16/BF16",
        attrs="dim: Int = -1",
        same="x y",
        source=_NN,
    ),
    Row(
        type="MoeGatingTopK",
        ins="x: F32/F16/BF16; bias?: F32/F16/BF16; input_ids? tid2eid?: INDEX",
        outs="y: F32/F16/BF16; expert_idx: I32; out: F32",
        attrs="""
            k: Int
            k_group: Int = 1
            group_count: Int = 1
            group_select_mode: Int = 0
            renorm: Int = 0
            norm_type: Int = 0
            out_flag: Bool = false
            routed_scaling_factor: Float = 1.0
            eps: Float = 1e-20
        """,
        same="x y",
        source=_TRANSFORMER,
        ran=_RECIPE,
    ),
    Row(
        type="MoeInitRoutingV3",
        ins=f"x: I8/F16/F32/BF16/{_NARROW}/E2M1; expert_idx: I32; scale?: F32/E8M0; offset?: F32",
        outs=f"""
            expanded_x: I8/F16/F32/BF16/{_NARROW}/E2M1/I4
            expanded_row_idx: I32
            expert_tokens_count_or_cumsum: I64
            expanded_scale: F32/E8M0
        """,
        attrs="""
            active_num: Int = -1
            expert_capacity: Int = -1
            expert_num: Int = -1
            drop_pad_mode: Int = 0
            expert_tokens_num_type: Int = 0
            expert_tokens_num_flag: Bool = false
            quant_mode: Int = -1
            active_expert_range: ListInt = []
            row_idx_type: Int = 0
        """,
        source=_TRANSFORMER,
    ),
    Row(
        type="MoeDistributeDispatchV2",
        ins=f"""
            x: BF16/F16/{_NARROW}/E2M1/E1M2
            expert_ids: I32
            scales?: F32/E8M0
            x_active_mask?: BOOL
            expert_scales?: F32
            elastic_info?: I32
            performance_info?: I64
        """,
        outs=f"""
            expand_x: BF16/I8/F16/{_NARROW}/E2M1/E1M2
            dynamic_scales: F32/E8M0
            assist_info_for_combine: I32
            expert_token_nums: I64
            ep_recv_count: I32
            tp_recv_count: I32
            expand_scales: F32
        """,
        attrs=f"""
            {_PAIR}
            shared_expert_num: Int = 1
            shared_expert_rank_num: Int = 0
            quant_mode: Int = 0
            global_bs: Int = 0
            expert_token_nums_type: Int = 1
            comm_alg: String = ""
            zero_expert_num: Int = 0
            copy_expert_num: Int = 0
            const_expert_num: Int = 0
            y_dtype: Int = 28
        """,
        source=_TRANSFORMER,
        ran=_RECIPE,
    ),
    Row(
        type="MoeDistributeCombineV2",
        ins="""
            expand_x: BF16/F16/I32
            expert_ids assist_info_for_combine ep_send_counts: I32
            expert_scales: F32
            tp_send_counts?: I32
            x_active_mask?: BOOL
            activation_scale? weight_scale?: F32
            group_list?: I64
            expand_scales?: F32
            shared_expert_x?: BF16/F16/I32
            elastic_info?: I32
            ori_x? const_expert_alpha_1? const_expert_alpha_2? const_expert_v?: BF16/F16/I32
            performance_info?: I64
        """,
        outs="x: BF16/F16",
        attrs=f"""
            {_PAIR}
            shared_expert_num: Int = 1
            shared_expert_rank_num: Int = 0
            global_bs: Int = 0
            out_dtype: Int = 0
            comm_quant_mode: Int = 0
            group_list_type: Int = 0
            comm_alg: String = ""
            zero_expert_num: Int = 0
            copy_expert_num: Int = 0
            const_expert_num: Int = 0
        """,
        same="expand_x x",
        source=_TRANSFORMER,
        ran=_RECIPE,
    ),
    Row(
        type="GroupedMatmul",
        ins=f"""
            x[]: F16/BF16/I8/F32/{_NARROW}/E2M1
            weight[]: F16/BF16/I8/F32/I4/{_NARROW}/E2M1
            bias[]: F16/F32/I32
            scale[]: U64/BF16/F32/E8M0
            offset[]: F32
            antiquant_scale[]: F16/BF16/E8M0
            antiquant_offset[]: F16/BF16
            group_list?: I64
            per_token_scale?: F32/E8M0
        """,
        outs="y[]: F16/BF16/I8/F32",
        attrs="""
            split_item: Int = 0
            dtype: Int = 0
            transpose_weight: Bool = false
            transpose_x: Bool = false
            group_type: Int = -1
            group_list_type: Int = 0
            act_type: Int = 0
            tuning_config: ListInt = [0]
        """,
        # with x in 16 bits, or E4M3 for E2M1; 8-bit weights with 8-bit x have more columns, which no graph of ours has
        layouts="""
            weight F16/BF16: ND FRACTAL_NZ
            weight E2M1: FRACTAL_NZ
        """,
        source="torchair's helper and " + _TRANSFORMER,
        ran=_RECIPE,
    ),
    Row(
        type="DynamicMxQuant",
        ins="x: F16/BF16/F32",
        outs="""
            y: E2M1/E1M2/E4M3/E5M2
            mxscale: E8M0
        """,
        attrs="""
            axis: Int = -1
            round_mode: String = "rint"
            dst_type: Int = 40
            blocksize: Int = 32
            scale_alg: Int = 0
            dst_type_max: Float = 0.0
            max_low_bound: Float = 0.0
        """,
        socs="950",
        source=_NN,
        ran=_RECIPE,
    ),
    Row(
        type="DynamicBlockQuant",
        ins="x: F16/BF16/F32",
        outs=f"""
            y: I8/{_NARROW}
            scale: F32
        """,
        attrs="""
            min_scale: Float = 0.0
            round_mode: String = "rint"
            dst_type: Int = 35
            row_block_size: Int = 1
            col_block_size: Int = 128
            dst_type_max: Float = 0.0
        """,
        source=_NN,
    ),
    Row(
        type="MoeFinalizeRoutingV2",
        ins="""
            expanded_x: F32/F16/BF16
            expanded_row_idx: I32
            x1? x2? bias? scales?: F32/F16/BF16
            expert_idx?: I32
            x? alpha1? alpha2? v?: F32/F16/BF16
        """,
        outs="y: F32/F16/BF16",
        attrs="""
            drop_pad_mode: Int = 0
            zero_expert_range: ListInt = []
            copy_expert_range: ListInt = []
            constant_expert_range: ListInt = []
            k: Int = 1
        """,
        same="expanded_x x1 x2 bias y",
        source=_TRANSFORMER,
    ),
    Row(
        type="ScatterPaKvCache",
        ins=f"""
            key key_cache: {_CACHE}
            slot_mapping: INDEX
            value value_cache: {_CACHE}
            compress_lens? compress_seq_offset? seq_lens?: INDEX
        """,
        outs=f"key_cache value_cache: {_CACHE}",
        attrs="""
            cache_mode: String = "Norm"
            scatter_mode: String = "None"
            strides: ListInt = [1, 1]
            offsets: ListInt = [0, 0]
        """,
        same="key key_cache value value_cache",
        source=_TRANSFORMER,
    ),
    Row(
        type="FusedInferAttentionScore",
        ins=f"""
            query: {_QKV}
            key[] value[]: {_KV}
            pse_shift?: F16/BF16
            atten_mask?: F16/BOOL/U8/I8
            actual_seq_lengths? actual_seq_lengths_kv?: I64
            dequant_scale1?: U64/F32
            quant_scale1?: F32
            dequant_scale2?: U64/F32
            quant_scale2? quant_offset2?: F32/BF16
            antiquant_scale? antiquant_offset?: F16/BF16/F32
            block_table?: I32
            query_padding_size? kv_padding_size?: I64
            key_antiquant_scale? key_antiquant_offset? value_antiquant_scale? value_antiquant_offset?: F16/BF16/F32
            key_shared_prefix? value_shared_prefix?: I8/F16/BF16
            actual_shared_prefix_len?: I64
            query_rope? key_rope?: I8/F16/BF16
            key_rope_antiquant_scale?: F16/BF16
            dequant_scale_query?: F32
            learnable_sink?: BF16
            q_start_idx? kv_start_idx?: I64
        """,
        outs="attention_out: F16/I8/BF16; softmax_lse: F32",
        attrs="""
            num_heads: Int
            scale: Float = 1.0
            pre_tokens: Int = 2147483647
            next_tokens: Int = 2147483647
            input_layout: String = "BSH"
            num_key_value_heads: Int = 0
            sparse_mode: Int = 0
            inner_precise: Int = 1
            block_size: Int = 0
            antiquant_mode: Int = 0
            softmax_lse_flag: Bool = false
            key_antiquant_mode: Int = 0
            value_antiquant_mode: Int = 0
            query_quant_mode: Int = 0
            pse_type: Int = 0
            out_dtype: Int = 0
        """,
        source="registration in ge, fact sheet of Ascend, appendix 1",
        ran=_RECIPE,
    ),
    Row(
        type="RecurrentGatedDeltaRule",
        ins="""
            query key value beta: BF16
            state: BF16/F32
            actual_seq_lengths ssm_state_indices: I32
            g? gk?: F32
            num_accepted_tokens?: I32
        """,
        outs="out: BF16; state: BF16/F32",
        attrs="scale_value: Float = 1.0",
        since="9.1 950",
        source=_TRANSFORMER,
        ran=_GDN,
    ),
    Row(
        type="RotaryPositionEmbedding",
        ins="x cos sin rotate?: F32/F16/BF16",
        outs="y: F32/F16/BF16",
        attrs="mode: Int = 0",
        same="x cos sin y",
        source=_TRANSFORMER + "; CANN 8.5 has it without `rotate`",
    ),
    Row(
        type="LightningIndexer",
        ins="""
            query key: BF16/F16
            weights: BF16/F16/F32
            actual_seq_lengths_query? actual_seq_lengths_key? block_table?: I32
        """,
        outs="sparse_indices: I32; sparse_values: BF16/F16",
        attrs=f"""
            layout_query: String = "BSND"
            layout_key: String = "BSND"
            sparse_count: Int = 2048
            sparse_mode: Int = 3
            pre_tokens: Int = {_INT64_MAX}
            next_tokens: Int = {_INT64_MAX}
            return_values: Bool = false
        """,
        same="query key sparse_values",
        since="9.1 950",
        source=_TRANSFORMER + ", and its definition in CANN 8.5 and 9.1",
        ran=_DSA,
    ),
    Row(
        type="SparseFlashAttention",
        ins="""
            query key value: BF16/F16
            sparse_indices: I32
            block_table? actual_seq_lengths_query? actual_seq_lengths_kv?: I32
            query_rope? key_rope?: BF16/F16
            sinks?: F32
        """,
        outs="attention_out: BF16/F16; softmax_max softmax_sum: F32",
        attrs=f"""
            scale_value: Float
            sparse_block_size: Int = 1
            layout_query: String = "BSND"
            layout_kv: String = "BSND"
            sparse_mode: Int = 3
            pre_tokens: Int = {_INT64_MAX}
            next_tokens: Int = {_INT64_MAX}
            attention_mode: Int = 0
            return_softmax_lse: Bool = false
        """,
        same="query key value query_rope key_rope attention_out",
        since="9.1 950",
        source=_TRANSFORMER + ", and its definition in CANN 8.5 and 9.1",
        ran=_DSA,
    ),
    Row(
        type="DynamicQuant",
        ins="x smooth_scales?: F16/BF16; group_index?: I32",
        outs="y: I8/I4/E5M2/E4M3/HIF8; scale: F32",
        attrs="dst_type: Int = 2",
        same="x smooth_scales",
        source=_NN,
    ),
    Row(
        type="QuantLightningIndexer",
        ins="""
            query key: I8/E4M3/HIF8
            weights: F16/BF16
            query_dequant_scale key_dequant_scale: F16/F32
            actual_seq_lengths_query? actual_seq_lengths_key? block_table?: I32
        """,
        outs="sparse_indices: I32",
        attrs=f"""
            query_quant_mode: Int
            key_quant_mode: Int
            layout_query: String = "BSND"
            layout_key: String = "BSND"
            sparse_count: Int = 2048
            sparse_mode: Int = 3
            pre_tokens: Int = {_INT64_MAX}
            next_tokens: Int = {_INT64_MAX}
            key_stride0: Int = -1
            key_dequant_scale_stride0: Int = -1
        """,
        same="query key; query_dequant_scale key_dequant_scale",
        since="9.1 950",
        source=_TRANSFORMER + ", and its definition in CANN 8.5, 9.0 and 9.1 (before 9.1 without the two strides); its "
        "aclnn document of 9.1 names 950 alone, its README and its definition A2 and A3 too",
    ),
    Row(
        type="KvQuantSparseFlashAttention",
        ins="""
            query: BF16/F16
            key value: I8/E4M3/HIF8
            sparse_indices: I32
            key_dequant_scale? value_dequant_scale?: F32
            block_table? actual_seq_lengths_query? actual_seq_lengths_kv?: I32
        """,
        outs="attention_out: BF16/F16",
        attrs=f"""
            scale_value: Float
            key_quant_mode: Int
            value_quant_mode: Int
            sparse_block_size: Int = 1
            layout_query: String = "BSND"
            layout_kv: String = "BSND"
            sparse_mode: Int = 3
            pre_tokens: Int = {_INT64_MAX}
            next_tokens: Int = {_INT64_MAX}
            attention_mode: Int = 0
            quant_scale_repo_mode: Int = 1
            tile_size: Int = 128
            rope_head_dim: Int = 64
        """,
        same="query attention_out; key value",
        since="9.1 950",
        source=_TRANSFORMER + ", and its definition in CANN 8.5, 9.0 and 9.1",
    ),
    Row(
        type="SituGlu",
        ins="x: F32/F16/BF16",
        outs="y: F32/F16/BF16",
        attrs="dim: Int = -1; beta: Float = 1.0; linear_beta: Float = 0.0; activate_left: Bool = true",
        same="x y",
        since="9.2",
        source=_NN,
    ),
    Row(
        type="SituMxQuant",
        ins="x: F16/BF16",
        outs="""
            y: E2M1/E1M2/E4M3/E5M2
            y_scale: E8M0
        """,
        attrs="""
            beta: Float = 1.0
            linear_beta: Float = 0.0
            activate_left: Bool = false
            axis: Int = -1
            dst_type: Int = 40
            round_mode: String = "rint"
        """,
        socs="950",
        since="9.2",
        source=_NN,
    ),
    Row(
        type="CausalConv1d",
        ins="""
            x weight conv_states: BF16/F16
            bias?: BF16/F16
            query_start_loc? cache_indices? initial_state_mode? num_accepted_tokens?: I32
        """,
        outs="conv_states y: BF16/F16",
        attrs='activation_mode: String = "silu"; null_block_id: Int = 0',
        same="x weight conv_states bias y",
        socs="950",
        since="9.2",
        source=_TRANSFORMER,
    ),
]


_KDA_STATE = "BF16/F32"
_SERVED = "vllm-ascend serves Kimi K3 with it, called one by one (aclnn); as a node of a GE graph nobody has said so"

VLLM_ASCEND = [
    Row(
        type="RecurrentKda",
        ins=f"""
            query key value: BF16
            gate beta: F32/BF16/F16
            initial_state: {_KDA_STATE}
            cu_seqlens? ssm_state_indices?: INDEX
            A_log? dt_bias?: F32
            num_accepted_tokens?: INDEX
        """,
        outs=f"attn_out: BF16; initial_state final_state: {_KDA_STATE}",
        attrs="""
            layout: String = "BSND"
            scale: Float = 1.0
            output_final_state: Bool = false
            inplace_final_state: Bool = true
            use_qk_l2norm_in_kernel: Bool = false
            use_gate_in_kernel: Bool = false
            use_beta_sigmoid_in_kernel: Bool = false
            allow_neg_eigval: Bool = false
            safe_gate: Bool = false
            lower_bound: Float = -5.0
            state_v_first: Bool = false
        """,
        same="initial_state final_state",
        provider="vllm-ascend",
        source="definition and shape inference in vllm-ascend (csrc/attention/recurrent_kda, August 2026), released in "
        "0.26.0rc1; an earlier form had no initial_state among its results",
        ran=_SERVED,
    ),
]


_REAL = "F32/F16/BF16"

OWN = [
    Row(
        type="SituMul",
        ins=f"gate up: {_REAL}",
        outs=f"y: {_REAL}",
        attrs="beta: Float; linear_beta: Float",
        same="gate up y",
        provider="own",
        source="the reference situ_mul",
    ),
    Row(
        type="SituMulQuant",
        ins=f"gate up: {_REAL}",
        outs="y: I8; scale: F32",
        attrs="beta: Float; linear_beta: Float",
        same="gate up",
        provider="own",
        source="the reference situ_mul, then DynamicQuant",
    ),
    Row(
        type="KdaStep",
        ins=f"q k v decay beta: {_REAL}; memory: F32; slots: I32; bias? log_rate?: F32",
        outs=f"o: {_REAL}; memory: F32",
        attrs="""
            scale: Float
            norm_eps: Float = -1.0
            beta_logits: Bool = false
            lower_bound: Float = 0.0
        """,
        same="q k v o; decay beta",
        provider="own",
        source="the reference kda_step",
    ),
    Row(
        type="GatedRmsNorm",
        ins=f"x gate weight: {_REAL}",
        outs=f"y: {_REAL}",
        attrs="eps: Float",
        same="x gate y",
        provider="own",
        source="the reference gated_rms_norm",
    ),
    Row(
        type="ResidualNormGate",
        ins=f"x residual? weight? gate?: {_REAL}",
        outs=f"y sum: {_REAL}",
        attrs="eps: Float = 0.0",
        same="x residual gate y sum",
        provider="own",
        source="the references rms_norm and sigmoid_gate",
    ),
    Row(
        type="ShortConv",
        ins=f"x weight window: {_REAL}; slots: I32; lengths counts: I64",
        outs=f"y window: {_REAL}",
        same="x y",
        provider="own",
        source="the reference short_conv",
    ),
    Row(
        type="KdaChunk",
        ins=f"q k v: {_REAL}; decay beta memory: F32; slots: I32; lengths counts: I64",
        outs=f"o: {_REAL}; memory: F32",
        attrs="scale: Float",
        same="q k v o",
        provider="own",
        source="the reference kda_chunk",
    ),
    Row(
        type="SparseAttend",
        ins="q q_rope latent rope: BF16/F16; selected block_table: I32; lengths counts: I64",
        outs="o: BF16/F16; lse: F32",
        attrs="scale: Float",
        same="q q_rope latent rope o",
        provider="own",
        source="the reference sparse_attention_lse",
    ),
    Row(
        type="AttnResMix",
        ins=f"sources[] norm query addend? gain?: {_REAL}",
        outs=f"y total: {_REAL}",
        attrs="eps: Float; norm_eps: Float = 0.0",
        same="sources addend y total; norm query gain",
        provider="own",
        source="the reference residual_mix",
    ),
]

EVERYTHING = [*STRUCTURE, *BASIC, *FUSED, *VLLM_ASCEND, *OWN]
ROWS = {row.type: row for row in EVERYTHING}
