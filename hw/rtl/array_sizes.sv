// Refuses parameters of matmul_axi that its streams, memories and registers are not made for, when the design is
// elaborated. It has no ports, and nothing of it is left in hardware. tools/array.sh has the same rules for make.

module array_sizes #(
    parameter int ROWS       = 16,
    parameter int COLS       = 16,
    parameter int TOKENS     = 16,
    parameter int MAX_INPUTS = 2048,
    parameter int SCALERS    = 4,
    parameter int MIN_GROUP  = 32,
    parameter bit FETCH      = 1'b0,
    parameter int FETCH_BURST = 32,
    parameter int FETCH_OUTSTANDING = 16,
    parameter int FETCH_ADDRESS_W = 40
) ();

  // A row of cells is a whole part of each group, and addresses of passes and groups are counted without gaps.
  localparam bit ROWS_FIT = ROWS == 4 || ROWS == 8 || ROWS == 16 || ROWS == 32 || ROWS == 64;
  // Scales and results are four beats. Register SHAPE has 12 bits.
  localparam bit COLS_FIT = COLS >= 4 && COLS <= 4092 && COLS % 4 == 0;
  localparam bit SCALERS_FIT = SCALERS >= 1 && SCALERS <= COLS && COLS % (SCALERS < 1 ? 1 : SCALERS) == 0;
  // Register SHAPE has 8 bits.
  localparam bit TOKENS_FIT = TOKENS >= 2 && TOKENS <= 128 && (TOKENS & (TOKENS - 1)) == 0;
  // Register LIMITS has 16 bits for each.
  localparam bit MIN_GROUP_FITS = MIN_GROUP >= ROWS && (MIN_GROUP & (MIN_GROUP - 1)) == 0;
  localparam bit MAX_INPUTS_FIT = MAX_INPUTS >= 2 * MIN_GROUP && MAX_INPUTS <= 32768 && (MAX_INPUTS & (MAX_INPUTS - 1)) == 0;
  // A beat of AXI4 is a power of two up to 1024 bits; a burst has up to 256 beats and 4 KB, and ends at a multiple of its
  // length.
  localparam bit FETCH_FITS = !FETCH || (COLS <= 128 && (COLS & (COLS - 1)) == 0);
  localparam bit BURST_FITS = !FETCH || (FETCH_BURST >= 2 && FETCH_BURST <= 256 && FETCH_BURST * COLS <= 4096 &&
                                         (FETCH_BURST & (FETCH_BURST - 1)) == 0);
  localparam bit OUTSTANDING_FITS = FETCH_OUTSTANDING >= 2 && FETCH_OUTSTANDING <= 256 &&
                                    (FETCH_OUTSTANDING & (FETCH_OUTSTANDING - 1)) == 0;
  localparam bit ADDRESS_W_FITS = FETCH_ADDRESS_W >= 32 && FETCH_ADDRESS_W <= 63;

`ifdef __ICARUS__
  // Icarus 11 has no $error outside of procedures: a module that there is not.
  if (!ROWS_FIT) ROWS_has_to_be_4_8_16_32_or_64 u_rows ();
  if (!COLS_FIT) COLS_has_to_be_a_multiple_of_4_up_to_4092 u_cols ();
  if (!SCALERS_FIT) SCALERS_has_to_divide_COLS u_scalers ();
  if (!TOKENS_FIT) TOKENS_has_to_be_a_power_of_two_from_2_to_128 u_tokens ();
  if (!MIN_GROUP_FITS) MIN_GROUP_has_to_be_a_power_of_two_from_ROWS_on u_min_group ();
  if (!FETCH_FITS) FETCH_has_to_be_0_unless_COLS_are_a_power_of_two_up_to_128 u_fetch ();
  if (!BURST_FITS) FETCH_BURST_has_to_be_a_power_of_two_from_2_to_256_and_4_KB u_burst ();
  if (!OUTSTANDING_FITS) FETCH_OUTSTANDING_has_to_be_a_power_of_two_from_2_to_256 u_outstanding ();
  if (!ADDRESS_W_FITS) FETCH_ADDRESS_W_has_to_be_32_to_63 u_address_w ();
  if (!MAX_INPUTS_FIT) MAX_INPUTS_has_to_be_a_power_of_two_from_2_MIN_GROUP_to_32768 u_max_inputs ();
`else
  if (!ROWS_FIT) $error("ROWS has to be 4, 8, 16, 32 or 64");
  if (!COLS_FIT) $error("COLS has to be a multiple of 4, up to 4092");
  if (!SCALERS_FIT) $error("SCALERS has to divide COLS");
  if (!TOKENS_FIT) $error("TOKENS has to be a power of two from 2 to 128");
  if (!MIN_GROUP_FITS) $error("MIN_GROUP has to be a power of two from ROWS on");
  if (!FETCH_FITS) $error("FETCH has to be 0 unless COLS are a power of two up to 128");
  if (!BURST_FITS) $error("FETCH_BURST has to be a power of two from 2 to 256, and a burst up to 4 KB");
  if (!OUTSTANDING_FITS) $error("FETCH_OUTSTANDING has to be a power of two from 2 to 256");
  if (!ADDRESS_W_FITS) $error("FETCH_ADDRESS_W has to be 32 to 63");
  if (!MAX_INPUTS_FIT) $error("MAX_INPUTS has to be a power of two from 2 * MIN_GROUP to 32768");
`endif

endmodule
